"""Publishes bundles: writes the blobs first, then the image manifest, the index last."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bundle.consistency import check_consistency
from bundle.errors import BlobNotFound, ManifestInvalid
from bundle.manifest import Manifest
from bundle.store.annotations import Origin, annotate_image
from bundle.store.blob_writer import StoredBlob
from bundle.store.layout import Layout
from bundle.store.oci import (
    BUNDLE_TYPE,
    IMAGE_MANIFEST_TYPE,
    MANIFEST_TITLE,
    MANIFEST_TYPE,
    REF_NAME,
    TITLE,
    BlobDescriptor,
    ImageManifest,
)
from bundle.store.reader import is_title, read_bundle
from bundle.store.referrers import ReferrerTree, with_referrers


class BundleWriter:
    """Writes one bundle. Callers add its blobs, then publish it once.

    Nothing is visible before `publish`. Blobs of a bundle that is never published stay in the store until a collection
    removes them; until then other writers can use them.
    """

    def __init__(self, layout: Layout) -> None:
        """Starts a bundle in a store. If collections may run meanwhile, the caller passes a `pinning` handle."""
        self._layout = layout
        self._layers: dict[str, BlobDescriptor] = {}

    def add_blob(self, source: Path | bytes | StoredBlob, media_type: str, title: str) -> BlobDescriptor:
        """Adds a file, which it copies, or bytes, or a blob of the store, to the bundle.

        Titles are relative paths in the bundle, and unique. Adding equal bytes under one again has no effect.
        """
        if not is_title(title):
            raise ManifestInvalid(f"layer title {title!r}; accepted: a relative path without '.' and '..'")
        stored = self._store(source)
        descriptor = BlobDescriptor(
            media_type=media_type,
            digest=stored.digest,
            size_bytes=stored.size_bytes,
            annotations={TITLE: title},
        )
        if self._layers.setdefault(title, descriptor) != descriptor:
            raise ManifestInvalid(f"two layers have the title {title!r}")
        return descriptor

    def publish(self, manifest: Manifest, *, origin: Origin | None = None, ref_name: str | None = None) -> str:
        """Makes the whole bundle visible at once. Adds the manifest as layer `manifest.json` too.

        Returns the bundle's digest, which depends on manifest, blobs and origin only, not on the order of the blobs.

        Args:
            origin: What the checkpoint says of itself, for the annotations; None if it says nothing.
            ref_name: Tag of the index entry, for registry tools. If another bundle has this tag, it loses it.

        Raises:
            BlobNotFound: The manifest names a blob that was not added, or a blob has been deleted meanwhile.
            ManifestInvalid: The manifest's parts do not fit each other, it holds values that JSON cannot, or another
                file has the title `manifest.json`.
            LayoutInvalid: The store's index is broken.
        """
        check_consistency(manifest)
        for digest in sorted(manifest.blobs() - {layer.digest for layer in self._layers.values()}):
            raise BlobNotFound(digest)
        try:
            manifest_json = manifest.to_json()
        except ValueError as error:
            raise ManifestInvalid(str(error)) from error
        config = self.add_blob(manifest_json, MANIFEST_TYPE, MANIFEST_TITLE)
        image = ImageManifest(
            schema_version=2,
            media_type=IMAGE_MANIFEST_TYPE,
            artifact_type=BUNDLE_TYPE,
            config=BlobDescriptor(media_type=MANIFEST_TYPE, digest=config.digest, size_bytes=config.size_bytes),
            layers=tuple(self._layers[title] for title in sorted(self._layers)),
            annotations=annotate_image(manifest, origin or Origin()),
        )
        digest = self._layout.put_blob(image.to_json()).digest
        register_bundle(self._layout, digest, ref_name=ref_name)
        return digest

    def _store(self, source: Path | bytes | StoredBlob) -> StoredBlob:
        if isinstance(source, StoredBlob):
            self._layout.pin(source.digest)
            return self._layout.stored(source.digest)
        if isinstance(source, bytes):
            return self._layout.put_blob(source)
        return self._layout.ingest_file(source)


def register_bundle(
    layout: Layout, digest: str, *, ref_name: str | None = None, referrers: ReferrerTree | None = None
) -> None:
    """Lists a bundle and its referrers in the index. All their blobs, image manifests too, must be in the store.

    This is the last step of publishing, and of copying a bundle from another store. If another bundle has the tag
    `ref_name`, it loses it.
    """
    # Under the lock, so that no deletion comes between the check and the listing.
    with layout.lock():
        descriptor = read_bundle(layout, digest).descriptor
        if ref_name is not None:
            descriptor = msgspec.structs.replace(descriptor, annotations={REF_NAME: ref_name})
        index = layout.read_index().with_manifest(descriptor)
        for subject, added in (referrers or {}).items():
            index = with_referrers(layout, index, subject, added)
        layout.replace_index(index)
