"""Lists the bundles of a layout and finds one by digest or tag."""

from __future__ import annotations

from dataclasses import dataclass

from bundle.digest import is_digest
from bundle.errors import BundleNotFound
from bundle.store.layout import Layout
from bundle.store.oci import BUNDLE_TYPE, IMAGE_MANIFEST_TYPE, ImageManifest, Index
from bundle.store.referrers import read_manifest


@dataclass(frozen=True, slots=True)
class ListedBundle:
    """A bundle in a layout's index, with the tags of its entries (`org.opencontainers.image.ref.name`), sorted."""

    digest: str
    tags: tuple[str, ...]


def list_bundles(layout: Layout) -> tuple[ListedBundle, ...]:
    """Lists the bundles of the index, in its order, without opening them."""
    return layout.read_through_index(lambda index: _list_bundles(layout, index))


def find_bundle(layout: Layout, ref: str) -> str:
    """Returns the digest of the bundle with a digest or tag; an empty `ref` names the only bundle of the layout."""
    listed = list_bundles(layout)
    if ref:
        found = [one.digest for one in listed if (one.digest == ref if is_digest(ref) else ref in one.tags)]
        known = ", ".join(sorted(tag for one in listed for tag in one.tags)) or "none"
        detail = f"{layout.root} has {len(listed)} bundles, with tags {known}"
    else:
        found = [one.digest for one in listed]
        detail = f"{layout.root} has {len(listed)} bundles: say which by digest or tag"
    if len(found) != 1:
        raise BundleNotFound(ref, detail)
    return found[0]


def _list_bundles(layout: Layout, index: Index) -> tuple[ListedBundle, ...]:
    tags: dict[str, set[str]] = {}
    for entry in index.manifests:
        if entry.media_type != IMAGE_MANIFEST_TYPE:
            continue
        # Some tools write no type into the index.
        if entry.artifact_type != BUNDLE_TYPE:
            image = read_manifest(layout, entry)
            if not isinstance(image, ImageManifest) or image.artifact_type != BUNDLE_TYPE:
                continue
        tags.setdefault(entry.digest, set()).update({entry.ref_name} - {""})
    return tuple(ListedBundle(digest, tuple(sorted(names))) for digest, names in tags.items())
