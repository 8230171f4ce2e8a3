"""What bundles a layout holds, and finding one by digest or tag."""

from __future__ import annotations

from dataclasses import dataclass

from bundle.digest import is_digest
from bundle.errors import BundleNotFound
from bundle.layout import Layout
from bundle.oci import BUNDLE_TYPE, IMAGE_MANIFEST_TYPE, ImageManifest, Index
from bundle.referrers import read_manifest


@dataclass(frozen=True, slots=True)
class ListedBundle:
    """A bundle of a layout's index.

    Attributes:
        tags: Tags of its index entries (`org.opencontainers.image.ref.name`), sorted.
    """

    digest: str
    tags: tuple[str, ...]


def list_bundles(layout: Layout) -> tuple[ListedBundle, ...]:
    """The bundles that the index lists, in its order. They are not opened.

    Raises:
        LayoutInvalid: The index, or a manifest that it lists, is broken.
    """
    return layout.read_through_index(lambda index: _list_bundles(layout, index))


def find_bundle(layout: Layout, ref: str) -> str:
    """Digest of a bundle.

    Args:
        ref: A digest; a tag; or nothing, where the layout holds one bundle.

    Raises:
        BundleNotFound: The index lists none of that digest or tag, or several that nothing could mean.
        LayoutInvalid: The index, or a manifest that it lists, is broken.
    """
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
        # Some tools leave the type out of the index.
        if entry.artifact_type != BUNDLE_TYPE:
            image = read_manifest(layout, entry)
            if not isinstance(image, ImageManifest) or image.artifact_type != BUNDLE_TYPE:
                continue
        tags.setdefault(entry.digest, set()).update({entry.ref_name} - {""})
    return tuple(ListedBundle(digest, tuple(sorted(names))) for digest, names in tags.items())
