"""Removes bundles, and collects the blobs that are no longer needed. Both may run while other processes write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from bundle.digest import parse_digest
from bundle.errors import BundleNotFound, LayoutInvalid
from bundle.store.layout import Layout
from bundle.store.oci import BUNDLE_TYPE, BlobDescriptor, Index
from bundle.store.referrers import read_manifest, without_referrers
from bundle.store.tags import is_written_tag


@dataclass(frozen=True, slots=True)
class Needs:
    """Bundles and further blobs that are needed for reasons that the layout does not know, by digest.

    A version, a lease or the like names the bundles.
    """

    bundles: frozenset[str] = frozenset()
    blobs: frozenset[str] = frozenset()


#: Returns what is needed. Called after the layout was locked and its pins were read. So if a writer records its needs
#: elsewhere before it removes its pins, the collection sees them in one of the two places.
FindNeeds = Callable[[], Needs]


class FreedSpace(NamedTuple):
    """The blobs and bytes that a removal has freed."""

    blob_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome of a collection."""

    bundle_count: int
    freed: FreedSpace
    kept: FreedSpace


def remove_bundle(layout: Layout, digest: str, find_needs: FindNeeds = Needs) -> FreedSpace:
    """Removes a bundle and its referrers from the index, then deletes their blobs that nothing else needs.

    If a living writer has pinned the bundle, or it is needed otherwise, nothing is removed. If the bundle's own image
    manifest is corrupt, only that is deleted, and its other blobs stay for the next collection.

    Raises BundleNotFound if the index does not list the bundle. If the index, or another manifest that it lists, cannot
    be read, raises LayoutInvalid and removes nothing.
    """
    # Under the lock, so that no bundle that shares blobs is published between the search and the deletion.
    with layout.lock():
        index = layout.read_index()
        if index.find(parse_digest(digest)) is None:
            raise BundleNotFound(digest)
        pins, needs = layout.read_pins(), find_needs()
        if digest in pins | needs.bundles:
            return FreedSpace(0, 0)
        remaining = without_referrers(layout, index, digest)
        kept = {blob for other in remaining.manifests for blob in _reachable_blobs(layout, other)}
        unneeded = set(_blobs_of_removed(layout, index, remaining, digest)) - kept - pins - needs.blobs
        layout.replace_index(remaining)
        return _delete_blobs(layout, unneeded)


def collect_garbage(layout: Layout, find_needs: FindNeeds, *, dry_run: bool = False) -> Collected:
    """Removes bundles without a name, with their referrers, then deletes every blob that nothing needs.

    `find_needs` returns what is needed besides what living writers have pinned. Unfinished blobs of writers that have
    ended go too, and are not counted. If the index, or a manifest that it lists, cannot be read, raises LayoutInvalid
    and removes nothing.

    A tag names its index entry, so entries with a tag stay; but the tags of `bundle.store.tags` only repeat what
    `find_needs` knows better. Entries that are not bundles stay too.
    """
    with layout.lock():
        index = layout.read_index()
        pins, needs = layout.read_pins(), find_needs()
        remaining, bundles = index, _unnamed_bundles(index) - pins - needs.bundles
        for digest in bundles:
            remaining = without_referrers(layout, remaining, digest)
        kept = {blob for entry in remaining.manifests for blob in _reachable_blobs(layout, entry)}
        kept |= pins | needs.blobs
        sizes = {blob: layout.stored(blob).size_bytes for blob in layout.list_blobs()}
        unneeded = sizes.keys() - kept
        if not dry_run:
            if remaining != index:
                layout.replace_index(remaining)
            _delete_blobs(layout, unneeded)
            layout.sweep_unfinished()
        freed = FreedSpace(len(unneeded), sum(sizes[blob] for blob in unneeded))
    return Collected(
        bundle_count=len(bundles),
        freed=freed,
        kept=FreedSpace(len(sizes) - freed.blob_count, sum(sizes.values()) - freed.size_bytes),
    )


def _unnamed_bundles(index: Index) -> set[str]:
    tagged = {entry.digest for entry in index.manifests if entry.ref_name and not is_written_tag(entry)}
    return {entry.digest for entry in index.manifests if entry.artifact_type == BUNDLE_TYPE} - tagged


def _blobs_of_removed(layout: Layout, index: Index, remaining: Index, digest: str) -> Iterator[str]:
    for entry in index.manifests:
        if entry in remaining.manifests:
            continue
        try:
            yield from list(_reachable_blobs(layout, entry))
        except LayoutInvalid:
            if entry.digest != digest:
                raise
            yield digest


def _reachable_blobs(layout: Layout, entry: BlobDescriptor) -> Iterator[str]:
    yield entry.digest
    manifest = read_manifest(layout, entry)
    if isinstance(manifest, Index):
        for child in manifest.manifests:
            yield from _reachable_blobs(layout, child)
    else:
        yield manifest.config.digest
        yield from (layer.digest for layer in manifest.layers)


def _delete_blobs(layout: Layout, digests: Set[str]) -> FreedSpace:
    sizes = [layout.delete_blob(digest) for digest in sorted(digests) if layout.has(digest)]
    return FreedSpace(len(sizes), sum(sizes))
