"""Copies a bundle between two layouts: copies only missing blobs, and verifies every byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bundle.digest import CHUNK_SIZE_BYTES
from bundle.errors import BlobCorrupt
from bundle.store.layout import Layout
from bundle.store.oci import BlobDescriptor, ImageManifest, Index
from bundle.store.reader import open_bundle
from bundle.store.referrers import ReferrerTree, find_referrer_tree, read_manifest
from bundle.store.verification import BlobVerifier
from bundle.store.writer import register_bundle

#: Called with the bytes copied so far and the bytes to copy in total.
TransferProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The outcome of a copy: the blobs that were missing or corrupt in the target, and those that it held already."""

    digest: str
    copied_blob_count: int
    copied_size_bytes: int
    present_blob_count: int


def copy_bundle(
    source: Layout,
    target: Layout,
    digest: str,
    *,
    verifier: BlobVerifier,
    ref_name: str | None = None,
    with_referrers: bool = True,
    progress: TransferProgress | None = None,
) -> Transfer:
    """Copies a bundle, which becomes visible in the target at the end. The blobs of a killed copy stay in the target.

    Replaces blobs of the target whose bytes do not have their digest. `verifier` verifies the blobs that the target
    holds already, and remembers those that are copied. If another bundle has the tag `ref_name`, it loses it.
    """
    bundle = open_bundle(source, digest)
    referrers, of_referrers = source.read_through_index(partial(_find_referrers, source, digest, with_referrers))
    with target.pinning() as writer:
        # Referrers come after their subjects.
        blobs = {blob.digest: blob for blob in (*of_referrers, *reversed(bundle.blobs))}
        missing = [blob for blob in blobs.values() if not _is_whole(writer, blob, verifier)]
        total_bytes = sum(blob.size_bytes for blob in missing)
        done_bytes = 0

        def advance(count: int) -> None:
            nonlocal done_bytes
            done_bytes += count
            if progress is not None:
                progress(done_bytes, total_bytes)

        advance(0)
        for blob in missing:
            _copy_blob(source, writer, blob, advance)
            verifier.remember(writer.blob_path(blob.digest), blob.digest)
        register_bundle(target, digest, ref_name=ref_name, referrers=referrers)
    return Transfer(digest, len(missing), total_bytes, len(blobs) - len(missing))


def _find_referrers(
    source: Layout, digest: str, are_wanted: bool, index: Index
) -> tuple[ReferrerTree, list[BlobDescriptor]]:
    """Finds a bundle's referrers and their blobs, manifests last."""
    tree = find_referrer_tree(source, index, digest) if are_wanted else {}
    blobs: list[BlobDescriptor] = []
    for referrer in (one for listed in tree.values() for one in listed):
        image = read_manifest(source, referrer)
        if isinstance(image, ImageManifest):
            blobs += (image.config, *image.layers)
        blobs.append(referrer)
    return tree, blobs


def _is_whole(target: Layout, blob: BlobDescriptor, verifier: BlobVerifier) -> bool:
    if not target.pin(blob.digest):
        return False
    try:
        verifier.verify(target.blob_path(blob.digest), blob.digest, blob.title)
    except BlobCorrupt:
        return False
    return True


def _copy_blob(source: Layout, target: Layout, blob: BlobDescriptor, advance: Callable[[int], None]) -> None:
    # This replaces a corrupt blob of the target, if there is one, and so repairs other bundles that share it.
    with (
        source.open_blob(blob.digest) as file,
        target.new_blob(expected_digest=blob.digest, replace=True) as writer,
    ):
        left = blob.size_bytes
        while left and (chunk := file.read(min(CHUNK_SIZE_BYTES, left))):
            writer.write(chunk)
            left -= len(chunk)
            advance(len(chunk))
        try:
            writer.commit()
        except BlobCorrupt as error:
            raise BlobCorrupt(blob.digest, error.metadata["actual"], blob.title) from error
