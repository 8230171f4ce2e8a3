"""The records of the OCI image specification that form a bundle, and the media types of all files but executables.

Readers check types and digests strictly and ignore properties that the specification does not have, as it demands.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec

from bundle.digest import Digest, canonical_json

INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
IMAGE_MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"

BUNDLE_TYPE: Final = "application/vnd.kiln.bundle.v1"
MANIFEST_TYPE: Final = "application/vnd.kiln.manifest.v1+json"
WEIGHTS_TYPE: Final = "application/vnd.kiln.weights.v1.safetensors"
TOKENIZER_TYPE: Final = "application/vnd.kiln.tokenizer.v1+json"
NEURON_CONFIG_TYPE: Final = "application/vnd.kiln.neuron-config.v1+json"

#: The config blob of an artifact without a config.
EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
EMPTY_JSON: Final = b"{}"

TITLE: Final = "org.opencontainers.image.title"
VERSION: Final = "org.opencontainers.image.version"
SOURCE: Final = "org.opencontainers.image.source"
REF_NAME: Final = "org.opencontainers.image.ref.name"

#: Title of the layer that repeats the config blob, because a mounted image volume shows layers only.
MANIFEST_TITLE: Final = "manifest.json"

#: Sizes that JSON readers without 64-bit integers read exactly.
SizeBytes = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]


class _OciRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An immutable record whose fields have the specification's names on disk."""

    def to_json(self) -> bytes:
        """Writes canonical JSON, without the properties that have no value."""
        return canonical_json(msgspec.to_builtins(self))


class BlobDescriptor(_OciRecord, frozen=True):
    """A reference to a blob: its type, digest and size."""

    media_type: str
    digest: Digest
    size_bytes: SizeBytes = msgspec.field(name="size")
    artifact_type: str | None = None
    annotations: dict[str, str] | None = None
    urls: tuple[str, ...] | None = None
    data: str | None = None
    platform: dict[str, str | tuple[str, ...]] | None = None

    @property
    def title(self) -> str:
        """File name inside the bundle; empty if it has none."""
        return (self.annotations or {}).get(TITLE, "")

    @property
    def ref_name(self) -> str:
        """Tag in an index; empty if it has none."""
        return (self.annotations or {}).get(REF_NAME, "")


class ImageManifest(_OciRecord, frozen=True):
    """OCI image manifest: a config blob and layers, one file per layer."""

    # The specification's fixed values have no default, so that `omit_defaults` keeps them.
    schema_version: Literal[2]
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"]
    config: BlobDescriptor
    layers: tuple[BlobDescriptor, ...]
    artifact_type: str | None = None
    subject: BlobDescriptor | None = None
    annotations: dict[str, str] | None = None


class Index(_OciRecord, frozen=True):
    """OCI image index: the manifests that a layout holds."""

    schema_version: Literal[2]
    manifests: tuple[BlobDescriptor, ...]
    media_type: Literal["application/vnd.oci.image.index.v1+json"] | None = None
    artifact_type: str | None = None
    subject: BlobDescriptor | None = None
    annotations: dict[str, str] | None = None

    def with_manifest(self, descriptor: BlobDescriptor) -> Index:
        """Returns the index with an entry, which replaces that of its tag or, if it has none, that of its digest."""
        key = (descriptor.ref_name, descriptor.digest if not descriptor.ref_name else "")
        kept = [m for m in self.manifests if (m.ref_name, m.digest if not m.ref_name else "") != key]
        return msgspec.structs.replace(self, manifests=(*kept, descriptor))

    def without_manifest(self, digest: str) -> Index:
        """Returns the index without the entries, tagged or not, of one manifest."""
        return msgspec.structs.replace(self, manifests=tuple(m for m in self.manifests if m.digest != digest))

    def without_tag(self, ref_name: str) -> Index:
        """Returns the index without the entry of one tag."""
        return msgspec.structs.replace(self, manifests=tuple(m for m in self.manifests if m.ref_name != ref_name))

    def find(self, digest: str) -> BlobDescriptor | None:
        """Returns an entry of the manifest; None if the index does not list it."""
        return next((m for m in self.manifests if m.digest == digest), None)


class LayoutMarker(_OciRecord, frozen=True):
    """The `oci-layout` file."""

    image_layout_version: Literal["1.0.0"]


RecordT = TypeVar("RecordT", bound=_OciRecord)


def parse_record(data: bytes, record: type[RecordT]) -> RecordT:
    """Reads a record from JSON. A ValueError names the property that does not follow the specification."""
    try:
        return msgspec.json.decode(data, type=record)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
