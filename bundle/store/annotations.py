"""The annotations of bundles, as data: the keys of the image manifest's, and how each is read.

The image manifest says only what the inputs of a bundle determine, so that equal inputs give equal digests. What a
version adds, such as its name, stands on the entry of the index; see `bundle.store.tags`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bundle.digest import canonical_json
from bundle.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Origin:
    """What a checkpoint's model card says of its origin; None where the card names none, or several base models.

    `licenses` is an SPDX licence expression, such as `Apache-2.0` or `LicenseRef-llama3`; `base_name` is the name of
    the model that the checkpoint was made from.
    """

    licenses: str | None = None
    base_name: str | None = None


@dataclass(frozen=True, slots=True)
class Annotation:
    """One annotation of an image manifest.

    Its key is the OCI image specification's if that has one, otherwise one below `dev.kiln`. If `read` returns None,
    the annotation is left out.
    """

    key: str
    read: Callable[[Manifest, Origin], str | None]


ANNOTATIONS: Final = (
    Annotation("org.opencontainers.image.licenses", lambda _, origin: origin.licenses),
    Annotation("org.opencontainers.image.base.name", lambda _, origin: origin.base_name),
    Annotation("dev.kiln.target", lambda manifest, _: manifest.target.kind),
    Annotation("dev.kiln.isa", lambda manifest, _: manifest.target.isa),
    Annotation("dev.kiln.abi-digest", lambda manifest, _: manifest.graph_abi_digest),
    Annotation("dev.kiln.tp-degree", lambda manifest, _: str(manifest.tp_degree)),
    # JSON, because versions of tools hold spaces and commas.
    Annotation("dev.kiln.toolchain", lambda manifest, _: canonical_json(manifest.toolchain).decode()),
)


def annotate_image(manifest: Manifest, origin: Origin) -> dict[str, str]:
    """Reads the annotations of a bundle's image manifest, by key."""
    values = {annotation.key: annotation.read(manifest, origin) for annotation in ANNOTATIONS}
    return {key: value for key, value in values.items() if value is not None}
