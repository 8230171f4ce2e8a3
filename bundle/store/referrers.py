"""Referrers: artifacts about a bundle that are not part of it, such as timings, results and signatures.

A referrer is an image manifest whose `subject` is the bundle (OCI image specification 1.1). Two places list it: the
layout's index, without a tag, for OCI 1.1 tools; and an image index under the tag `sha256-HEX`, the fallback for
registries without the referrers API, so that tools that know only tags can copy a bundle's referrers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from bundle.digest import PREFIX, parse_digest
from bundle.errors import BundleError, BundleNotFound, LayoutInvalid, ManifestInvalid
from bundle.store.layout import Layout
from bundle.store.oci import (
    BUNDLE_TYPE,
    EMPTY_JSON,
    EMPTY_TYPE,
    IMAGE_MANIFEST_TYPE,
    INDEX_TYPE,
    REF_NAME,
    TITLE,
    BlobDescriptor,
    ImageManifest,
    Index,
    parse_record,
)
from bundle.store.reader import MAX_IMAGE_MANIFEST_BYTES, is_title, read_small_blob

MAX_REFERRER_BYTES: Final = 64 << 20

#: Referrers by the digest of their subject.
ReferrerTree = Mapping[str, tuple[BlobDescriptor, ...]]


def add_referrer(
    layout: Layout, subject_digest: str, artifact_type: str, media_type: str, data: bytes, *, title: str
) -> str:
    """Attaches a small file to a bundle, or to another manifest that the index lists. Attaching equal bytes again has
    no effect. The artifact type is the referrer's kind, such as `application/vnd.kiln.timings.v1`.

    Returns the digest of the referrer's image manifest.
    """
    if not is_title(title):
        raise ManifestInvalid(f"title {title!r}; accepted: a relative path without '.' and '..'", subject_digest)
    with layout.pinning() as writer:
        subject = _describe_subject(layout, subject_digest)
        config, layer = writer.put_blob(EMPTY_JSON), writer.put_blob(data)
        image = ImageManifest(
            schema_version=2,
            media_type=IMAGE_MANIFEST_TYPE,
            artifact_type=artifact_type,
            config=BlobDescriptor(media_type=EMPTY_TYPE, digest=config.digest, size_bytes=config.size_bytes),
            layers=(
                BlobDescriptor(
                    media_type=media_type,
                    digest=layer.digest,
                    size_bytes=layer.size_bytes,
                    annotations={TITLE: title},
                ),
            ),
            subject=subject,
        )
        stored = writer.put_blob(image.to_json())
        descriptor = BlobDescriptor(
            media_type=IMAGE_MANIFEST_TYPE,
            digest=stored.digest,
            size_bytes=stored.size_bytes,
            artifact_type=artifact_type,
        )
        with layout.lock():
            index = layout.read_index()
            if index.find(subject_digest) is None:
                raise BundleNotFound(subject_digest)
            layout.replace_index(with_referrers(layout, index, subject_digest, (descriptor,)))
    return stored.digest


def list_referrers(layout: Layout, digest: str, artifact_type: str | None = None) -> tuple[BlobDescriptor, ...]:
    """Lists the image manifests whose subject is `digest`, of one artifact type or of all, ordered by digest."""
    parse_digest(digest)
    found = layout.read_through_index(lambda index: find_referrers(layout, index, digest))
    return tuple(one for one in found if artifact_type in {None, one.artifact_type})


def list_referrer_files(layout: Layout, digest: str) -> tuple[BlobDescriptor, ...]:
    """Lists the files of a manifest's referrers under the tag `sha256-HEX`; leaves out unreadable referrers.

    Reads only the index and these referrers, whereas `list_referrers` reads those of all bundles. A layout that another
    tool wrote may lack the tag.
    """
    tag = fallback_tag(digest)
    listing = next((one for one in layout.read_index().manifests if one.ref_name == tag), None)
    files: dict[str, BlobDescriptor] = {}
    with suppress(BundleError):
        for entry in _listed_in(layout, listing):
            with suppress(BundleError):
                image = read_manifest(layout, entry)
                if isinstance(image, ImageManifest) and image.subject is not None and image.subject.digest == digest:
                    files.update((layer.digest, layer) for layer in image.layers if layer.media_type != EMPTY_TYPE)
    return tuple(files.values())


def read_referrer(layout: Layout, digest: str) -> bytes:
    """Reads the file of a referrer, of at most 64 MiB."""
    try:
        image = parse_record(read_small_blob(layout, digest, MAX_IMAGE_MANIFEST_BYTES), ImageManifest)
    except ValueError as error:
        raise ManifestInvalid(str(error), digest) from error
    if len(image.layers) != 1:
        raise ManifestInvalid(f"{len(image.layers)} layers; accepted: one", digest)
    return read_small_blob(layout, image.layers[0].digest, MAX_REFERRER_BYTES)


def find_referrers(layout: Layout, index: Index, digest: str) -> tuple[BlobDescriptor, ...]:
    """Does the same as `list_referrers`, in an index that the caller has read."""
    found: dict[str, BlobDescriptor] = {}
    for entry in _walk_manifests(layout, index):
        # Skipped, because bundles have no subject and are many.
        if entry.media_type != IMAGE_MANIFEST_TYPE or entry.artifact_type == BUNDLE_TYPE or entry.digest in found:
            continue
        image = read_manifest(layout, entry)
        if isinstance(image, ImageManifest) and image.subject is not None and image.subject.digest == digest:
            found[entry.digest] = BlobDescriptor(
                media_type=entry.media_type,
                digest=entry.digest,
                size_bytes=entry.size_bytes,
                artifact_type=image.artifact_type or image.config.media_type,
                annotations=image.annotations,
            )
    return tuple(found[digest] for digest in sorted(found))


def find_referrer_tree(layout: Layout, index: Index, digest: str) -> ReferrerTree:
    """Finds the referrers of a manifest, and the referrers of these."""
    tree: dict[str, tuple[BlobDescriptor, ...]] = {}
    waiting = [digest]
    while waiting:
        subject = waiting.pop()
        referrers = find_referrers(layout, index, subject)
        if referrers and subject not in tree:
            tree[subject] = referrers
            waiting += [one.digest for one in referrers]
    return tree


def with_referrers(layout: Layout, index: Index, subject_digest: str, added: tuple[BlobDescriptor, ...]) -> Index:
    """Returns the index with referrers added to a manifest. The caller holds the lock and replaces the index."""
    for one in added:
        if index.find(one.digest) is None:
            index = index.with_manifest(one)
    tag = fallback_tag(subject_digest)
    listing = Index(schema_version=2, media_type=INDEX_TYPE, manifests=find_referrers(layout, index, subject_digest))
    # The next collection removes the former listing: a reader may be using it.
    stored = Layout(layout.root).put_blob(listing.to_json())
    return index.with_manifest(
        BlobDescriptor(
            media_type=INDEX_TYPE,
            digest=stored.digest,
            size_bytes=stored.size_bytes,
            annotations={REF_NAME: tag},
        )
    )


def without_referrers(layout: Layout, index: Index, digest: str) -> Index:
    """Returns the index without a manifest, its referrers, the referrers of these, and the listings of all of them."""
    tree = find_referrer_tree(layout, index, digest)
    gone = {digest, *(one.digest for referrers in tree.values() for one in referrers)}
    for one in gone:
        index = index.without_manifest(one).without_tag(fallback_tag(one))
    return index


def fallback_tag(digest: str) -> str:
    """Returns the tag that lists a manifest's referrers if there is no referrers API."""
    return f"sha256-{parse_digest(digest).removeprefix(PREFIX)}"


def read_manifest(layout: Layout, entry: BlobDescriptor) -> ImageManifest | Index:
    """Reads the manifest of an index entry."""
    try:
        data = read_small_blob(layout, entry.digest, MAX_IMAGE_MANIFEST_BYTES)
        return parse_record(data, Index) if entry.media_type == INDEX_TYPE else parse_record(data, ImageManifest)
    except (BundleError, ValueError) as error:
        raise LayoutInvalid(layout.root.name, f"manifest {entry.digest}: {error}") from error


def _walk_manifests(layout: Layout, index: Index) -> Iterator[BlobDescriptor]:
    for entry in index.manifests:
        if entry.media_type == INDEX_TYPE:
            nested = read_manifest(layout, entry)
            assert isinstance(nested, Index)
            yield from _walk_manifests(layout, nested)
        else:
            yield entry


def _listed_in(layout: Layout, listing: BlobDescriptor | None) -> tuple[BlobDescriptor, ...]:
    if listing is None:
        return ()
    manifest = read_manifest(layout, listing)
    return manifest.manifests if isinstance(manifest, Index) else ()


def _describe_subject(layout: Layout, digest: str) -> BlobDescriptor:
    entry = layout.read_index().find(parse_digest(digest))
    if entry is None:
        raise BundleNotFound(digest)
    return BlobDescriptor(media_type=entry.media_type, digest=digest, size_bytes=entry.size_bytes)
