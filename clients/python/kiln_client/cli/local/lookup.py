"""Finds what a person means by MODEL: a bundle, a checkpoint below a model root or anywhere, or a model of the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kiln.bundle.v1.bundle_pb2 import Bundle

from kiln_client.bundles import AsyncBundles
from kiln_client.errors import InvalidArgument, ModelNotFound, NotFound

_CONFIG: Final = "config.json"
_GGUF: Final = ".gguf"
_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID: Final = re.compile(rf"{_PART}/{_PART}")
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9._-]+")
_MAX_NAME: Final = 56  # the id of a deployment may have 64 characters, and may get a number


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on this host, a directory or a GGUF file. Its bundle and its deployment get its name; its path has
    no links."""

    name: str
    path: Path

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Takes a path that `is_checkpoint`."""
        named = Path(os.path.abspath(path))  # noqa: PTH100 - the name of a link counts, not that of its end
        return cls(name_of(_model_name(named).removesuffix(_GGUF)), path.resolve())

    @property
    def roots(self) -> list[Path]:
        """What the compiler must be able to read: a file, or the directory and those that its links lead to."""
        files = {file.resolve().parent for file in self.path.rglob("*") if file.is_file()}
        outside = {folder for folder in files if not folder.is_relative_to(self.path)}
        return [self.path, *sorted(outside)]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model, such as `meta-llama/Llama-3.2-1B`, that the Hub may have and this host has not."""

    repo_id: str


def find_checkpoint(text: str, model_roots: Sequence[Path]) -> Checkpoint | HubModel | None:
    """Finds a model without asking the compiler; None if the text may be a bundle.

    A text that begins with `.` or `/` is a path, and one that ends with `.gguf` if there is such a file. Any other text
    with a `/` is no bundle reference: it is below a model root, else below the current directory, else an id of the
    Hub.
    """
    if text.startswith((".", "/")):
        if not is_checkpoint(Path(text)):
            raise ModelNotFound(text, f"a directory with a {_CONFIG}, or a file *{_GGUF}")
        return Checkpoint.open(Path(text))
    if "/" not in text:
        return Checkpoint.open(Path(text)) if _is_gguf(Path(text)) else None
    found = _find_below(text, (*model_roots, Path()))
    if found is None and not _HUB_ID.fullmatch(text):
        raise ModelNotFound(text, _accept(model_roots))
    return found or HubModel(text)


async def find_named(text: str, bundles: AsyncBundles, model_roots: Sequence[Path]) -> Bundle | Checkpoint:
    """Finds a model by a text without `/`: first as a bundle reference, then as a directory below the model roots."""
    try:
        return await bundles.get_bundle(text)
    except (NotFound, InvalidArgument):  # no bundle, or no bundle reference
        pass
    found = _find_below(text, model_roots)
    if found is None:
        # The compiler was started without it among its model roots.
        here = f"./{text}, a directory of this name, or " if _find_below(text, (Path(),)) else ""
        raise ModelNotFound(text, f"{here}{_accept(model_roots)}")
    return found


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a directory that holds a checkpoint, or a GGUF file."""
    return (path / _CONFIG).is_file() or _is_gguf(path)


def _is_gguf(path: Path) -> bool:
    return path.suffix == _GGUF and path.is_file()


def name_of(text: str) -> str:
    """Makes a name that bundles and deployments may have."""
    name = _NOT_IN_NAMES.sub("-", text.lower()).strip("-._")
    return name[:_MAX_NAME] or "model"


def deployment_name(text: str) -> str:
    """Makes the id of a deployment from what a person wrote, which is no path: a bundle reference or a model's name."""
    kind, _, rest = text.partition(":")
    if kind == "sha256":
        return name_of(rest[:12])
    return name_of(re.split("[:@]", text)[0].rpartition("/")[2])


def _model_name(path: Path) -> str:
    """The last part of a path; of a snapshot of the Hub's cache, `models--ORG--NAME/snapshots/COMMIT`, the model's."""
    snapshots, cached = path.parent, path.parent.parent.name
    is_snapshot = snapshots.name == "snapshots" and cached.startswith("models--")
    return cached.rpartition("--")[2] if is_snapshot else path.name


def _find_below(text: str, model_roots: Sequence[Path]) -> Checkpoint | None:
    paths = (root / text for root in model_roots if ".." not in Path(text).parts)
    return next((Checkpoint.open(path) for path in paths if is_checkpoint(path)), None)


def _accept(model_roots: Sequence[Path]) -> str:
    roots = " or ".join(dict.fromkeys(map(str, model_roots)))
    return (
        f"a bundle (`kiln bundles list`), the name of a directory below {roots} or here, a GGUF file, a path that"
        " begins with . or /, or the id of a model of the Hub, ORG/NAME"
    )
