"""Removing bundles, and the blobs that nothing in the store needs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from bundle.digest import parse_digest
from bundle.errors import BundleError, BundleNotFound, LayoutInvalid
from bundle.layout import Layout
from bundle.oci import INDEX_TYPE, BlobDescriptor, ImageManifest, Index, parse_record
from bundle.reader import MAX_IMAGE_MANIFEST_BYTES, read_small_blob


class FreedSpace(NamedTuple):
    """What a removal gave back."""

    blob_count: int
    size_bytes: int


def remove_bundle(layout: Layout, digest: str) -> FreedSpace:
    """Takes a bundle from the index, then deletes its blobs that no other manifest of the index refers to.

    Where the bundle's own image manifest is corrupt, only that is deleted, and its other blobs stay.

    Raises:
        BundleNotFound: The index does not list it.
        LayoutInvalid: The index, or another manifest that it lists, cannot be read; nothing is removed.
        DigestInvalid: `digest` is none.
    """
    # Under the lock, so that no bundle that shares blobs is published between looking and deleting.
    with layout.lock():
        index = layout.read_index()
        entry = index.find(parse_digest(digest))
        if entry is None:
            raise BundleNotFound(digest)
        remaining = index.without_manifest(digest)
        kept = {blob for other in remaining.manifests for blob in _reachable_blobs(layout, other)}
        try:
            unneeded = set(_reachable_blobs(layout, entry)) - kept
        except LayoutInvalid:
            unneeded = {digest} - kept
        layout.replace_index(remaining)
        sizes = [layout.delete_blob(blob) for blob in sorted(unneeded) if layout.has(blob)]
    return FreedSpace(len(sizes), sum(sizes))


def remove_unneeded_blobs(layout: Layout, *, min_age_s: float) -> FreedSpace:
    """Deletes blobs that no manifest of the index refers to: those of bundles that were never finished.

    Args:
        min_age_s: Younger blobs stay, because their bundle may be on its way.

    Raises:
        LayoutInvalid: The index, or a manifest that it lists, cannot be read; nothing is removed.
    """
    with layout.lock():
        needed = {blob for entry in layout.read_index().manifests for blob in _reachable_blobs(layout, entry)}
        youngest_s = time.time() - min_age_s
        unneeded = [
            blob
            for blob in layout.list_blobs()
            if blob not in needed and layout.blob_path(blob).stat().st_mtime <= youngest_s
        ]
        sizes = [layout.delete_blob(blob) for blob in unneeded]
    return FreedSpace(len(sizes), sum(sizes))


def _reachable_blobs(layout: Layout, entry: BlobDescriptor) -> Iterator[str]:
    yield entry.digest
    record = _read_manifest(layout, entry)
    if isinstance(record, Index):
        for child in record.manifests:
            yield from _reachable_blobs(layout, child)
    else:
        yield record.config.digest
        yield from (layer.digest for layer in record.layers)


def _read_manifest(layout: Layout, entry: BlobDescriptor) -> ImageManifest | Index:
    try:
        data = read_small_blob(layout, entry.digest, MAX_IMAGE_MANIFEST_BYTES)
        return parse_record(data, Index) if entry.media_type == INDEX_TYPE else parse_record(data, ImageManifest)
    except (BundleError, ValueError) as error:
        raise LayoutInvalid(str(layout.root), f"manifest {entry.digest}: {error}") from error
