"""Reads bundles from a store."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bundle.consistency import check_consistency
from bundle.digest import Progress, parse_digest, sha256_bytes
from bundle.errors import BlobCorrupt, BlobMissing, BlobNotFound, BundleNotFound, ManifestInvalid
from bundle.manifest import Manifest
from bundle.manifest_parser import parse_manifest
from bundle.neff import check_neffs
from bundle.store.blob_writer import StoredBlob
from bundle.store.layout import Layout
from bundle.store.oci import (
    BUNDLE_TYPE,
    IMAGE_MANIFEST_TYPE,
    MANIFEST_TYPE,
    BlobDescriptor,
    ImageManifest,
    parse_record,
)
from bundle.store.verification import BlobVerifier

# Readers hold whole manifests in memory; registries refuse image manifests of more than 4 MiB.
MAX_IMAGE_MANIFEST_BYTES: Final = 4 << 20
MAX_MANIFEST_BYTES: Final = 64 << 20


class BlobFiles(Protocol):
    """Files of blobs: a `Layout`, or a directory of another form."""

    def stored(self, digest: str) -> StoredBlob:
        """See `Layout.stored`."""

    def blob_path(self, digest: str) -> Path:
        """See `Layout.blob_path`."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle of a store. Its manifests are verified; its other blobs exist and have the right size.

    The digest of `descriptor`, the image manifest's own, is the bundle's. `manifest` is the image's config blob, and
    `manifest_json` the bytes of that, which may have fields that `manifest` has not.
    """

    layout: BlobFiles
    descriptor: BlobDescriptor
    image: ImageManifest
    manifest: Manifest
    manifest_json: bytes

    @property
    def digest(self) -> str:
        """The bundle's digest."""
        return self.descriptor.digest

    @property
    def blobs(self) -> tuple[BlobDescriptor, ...]:
        """Every blob: image manifest, config, layers."""
        return (self.descriptor, self.image.config, *self.image.layers)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blobs. A blob that several layers share counts once."""
        return sum({blob.digest: blob.size_bytes for blob in self.blobs}.values())

    def blob_path(self, digest: str) -> Path:
        """Returns the path of a blob, which need not be verified."""
        return self.layout.blob_path(digest)

    def verify(self, verifier: BlobVerifier, progress: Progress | None = None) -> None:
        """Verifies every blob and reports bytes to `progress`, `size_bytes` in total."""
        for blob in {blob.digest: blob for blob in self.blobs}.values():
            verifier.verify(self.blob_path(blob.digest), blob.digest, blob.title, progress)
        check_neffs(self.manifest, self.blob_path)


def open_bundle(layout: Layout, digest: str) -> Bundle:
    """Opens a published bundle.

    Raises:
        BundleNotFound: The index does not list the bundle.
        BlobMissing, BlobCorrupt: One of its blobs is missing, has another size, or is a manifest with other bytes.
        ManifestInvalid, AbiUnsupported: A manifest does not follow its schema.
        DigestInvalid, LayoutInvalid: See `parse_digest`, `Layout.read_index`.
    """
    entry = layout.read_index().find(parse_digest(digest))
    if entry is None:
        raise BundleNotFound(digest)
    try:
        return read_bundle(layout, digest)
    except BlobNotFound as error:
        raise BlobMissing(error.metadata["digest"], digest) from error


def read_bundle(layout: Layout, digest: str) -> Bundle:
    """Reads a bundle, which the index need not list yet."""
    data = read_small_blob(layout, digest, MAX_IMAGE_MANIFEST_BYTES)
    image = _parse_image(data, digest)
    manifest_json = read_small_blob(layout, image.config.digest, MAX_MANIFEST_BYTES)
    manifest = parse_manifest(manifest_json, digest=digest)
    check_consistency(manifest, digest=digest)
    check_layers(image, manifest, digest)
    descriptor = BlobDescriptor(
        media_type=IMAGE_MANIFEST_TYPE, digest=digest, size_bytes=len(data), artifact_type=BUNDLE_TYPE
    )
    bundle = Bundle(layout=layout, descriptor=descriptor, image=image, manifest=manifest, manifest_json=manifest_json)
    for blob in bundle.blobs:
        size_bytes = layout.stored(blob.digest).size_bytes
        if size_bytes != blob.size_bytes:
            raise BlobCorrupt(blob.digest, f"{size_bytes} bytes long instead of {blob.size_bytes}", blob.title)
    return bundle


def check_layers(image: ImageManifest, manifest: Manifest, digest: str) -> None:
    """Checks that every blob of a manifest is a layer, and every shard as large as the manifest says."""
    sizes = {layer.digest: layer.size_bytes for layer in image.layers}
    missing = manifest.blobs() - sizes.keys()
    if missing:
        raise ManifestInvalid(f"blob {min(missing)} is named, but is no layer of the image", digest)
    for shard in manifest.written_shards():
        if shard.blob is not None and shard.size_bytes != sizes[shard.blob]:
            raise ManifestInvalid(
                f"weights of rank {shard.rank} are said to have {shard.size_bytes} bytes; "
                f"the layer has {sizes[shard.blob]}",
                digest,
            )


def _parse_image(data: bytes, digest: str) -> ImageManifest:
    try:
        image = parse_record(data, ImageManifest)
    except ValueError as error:
        raise ManifestInvalid(str(error), digest) from error
    if image.artifact_type != BUNDLE_TYPE:
        raise ManifestInvalid(f"artifactType is {image.artifact_type!r}; accepted: {BUNDLE_TYPE}", digest)
    if image.config.media_type != MANIFEST_TYPE:
        raise ManifestInvalid(f"config.mediaType is {image.config.media_type!r}; accepted: {MANIFEST_TYPE}", digest)
    titles = [layer.title for layer in image.layers]
    for title in titles:
        if not is_title(title):
            raise ManifestInvalid(f"layer title {title!r}; accepted: a relative path without '.' and '..'", digest)
    if len(set(titles)) < len(titles):
        raise ManifestInvalid("two layers have the same title", digest)
    return image


def is_title(text: str) -> bool:
    """Whether a layer's title is a relative path that stays below the directory in which it is written."""
    return (
        text == posixpath.normpath(text)
        and not text.startswith(("/", "../"))
        and text not in {".", ".."}
        and text.isprintable()
        and "\\" not in text
    )


def read_small_blob(layout: Layout, digest: str, limit_bytes: int) -> bytes:
    """Reads a blob into memory and verifies it."""
    with layout.open_blob(digest) as blob:
        data = blob.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ManifestInvalid(f"blob {digest} is larger than {limit_bytes} bytes", digest)
    actual = sha256_bytes(data)
    if actual != digest:
        raise BlobCorrupt(digest, actual)
    return data
