"""Publishes bundles: writes the blobs first, then the image manifest, the index last."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bundle.annotations import Origin, annotate_image
from bundle.blob_writer import StoredBlob
from bundle.consistency import check_consistency
from bundle.errors import BlobNotFound, ManifestInvalid
from bundle.layout import Layout
from bundle.manifest import Manifest
from bundle.oci import (
    BUNDLE_TYPE,
    IMAGE_MANIFEST_TYPE,
    MANIFEST_TITLE,
    MANIFEST_TYPE,
    REF_NAME,
    TITLE,
    BlobDescriptor,
    ImageManifest,
)
from bundle.reader import is_title, read_bundle
from bundle.referrers import ReferrerTree, with_referrers


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
        """Adds a file to the bundle. Adding equal bytes under the same title again has no effect.

        Args:
            source: A file, which is copied; bytes; or a blob of the store.
            media_type: See `bundle.oci`.
            title: Relative path of the file in the bundle, unique in it.

        Raises:
            ManifestInvalid: The title is not a relative path, or another file of the bundle has it.
            BlobNotFound: The store does not hold the given blob.
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

        Args:
            manifest: Describes the blobs that were added.
            origin: What the checkpoint says of itself, for the annotations; None if it says nothing.
            ref_name: Tag of the index entry, for registry tools. If another bundle has this tag, it loses it.

        Returns:
            The bundle's digest. It depends on manifest, blobs and origin only, not on the order in which the blobs
            were added.

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
    """Lists a bundle in the index. All its blobs, including its image manifest, must be in the store.

    This is the last step of publishing, and of copying a bundle from another store.

    Args:
        ref_name: Tag of the index entry. If another bundle has this tag, it loses it.
        referrers: Referrers to list with the bundle. Their blobs must be in the store.

    Raises:
        BlobNotFound, BlobCorrupt, ManifestInvalid, AbiUnsupported: See `bundle.reader.read_bundle`.
        LayoutInvalid: The store's index is broken.
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
