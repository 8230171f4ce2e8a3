import json
import os
import time
from pathlib import Path

import pytest

from bundle.digest import sha256_bytes
from bundle.errors import BundleNotFound, DigestInvalid, LayoutInvalid
from bundle.layout import Layout
from bundle.oci import IMAGE_MANIFEST_TYPE, INDEX_TYPE, Index
from bundle.reader import open_bundle
from bundle.removal import FreedSpace, remove_bundle, remove_unneeded_blobs
from bundle.verification import BlobVerifier
from tests.bundle.samples import DIGESTS, list_manifest, publish_sample, sample_manifest, unlist_manifest


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "layout")


def corrupt(layout: Layout, digest: str) -> None:
    path = layout.blob_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"{}")


def test_last_bundle_takes_all_its_blobs(layout: Layout) -> None:
    digest = publish_sample(layout, ref_name="tiny:v1")
    publish_sample(layout, ref_name="tiny:v2")
    expected = FreedSpace(7, open_bundle(layout, digest).size_bytes)
    assert remove_bundle(layout, digest) == expected
    assert list(layout.list_blobs()) == []
    assert layout.read_index().manifests == ()


def test_blobs_of_other_bundles_stay(layout: Layout) -> None:
    first, second = (publish_sample(layout, version=version) for version in "12")
    sizes = [layout.stored(digest).size_bytes for digest in (first, sha256_bytes(sample_manifest().to_json()))]
    assert remove_bundle(layout, first) == FreedSpace(2, sum(sizes))
    open_bundle(layout, second).verify(BlobVerifier(None))
    with pytest.raises(BundleNotFound):
        open_bundle(layout, first)


def test_blobs_of_nobody_stay(layout: Layout) -> None:
    being_written = layout.put_blob(b"of a bundle that is being written").digest
    remove_bundle(layout, publish_sample(layout))
    assert list(layout.list_blobs()) == [being_written]


def test_blobs_behind_a_nested_index_stay(layout: Layout) -> None:
    first, second = (publish_sample(layout, version=version) for version in "12")
    inner = Index(schema_version=2, media_type=INDEX_TYPE, manifests=(open_bundle(layout, second).descriptor,))
    stored = layout.put_blob(inner.to_json())
    list_manifest(layout, stored, INDEX_TYPE)
    unlist_manifest(layout, second)
    assert remove_bundle(layout, first).blob_count == 2
    assert set(DIGESTS.values()) <= set(layout.list_blobs())
    assert layout.has(second)


def test_absent_bundle_is_named(layout: Layout) -> None:
    absent = sha256_bytes(b"absent")
    with pytest.raises(BundleNotFound, match=absent):
        remove_bundle(layout, absent)
    with pytest.raises(DigestInvalid):
        remove_bundle(layout, "tiny:v1")


def test_nothing_is_removed_where_another_manifest_cannot_be_read(layout: Layout) -> None:
    first, second = (publish_sample(layout, version=version) for version in "12")
    corrupt(layout, second)
    before = set(layout.list_blobs())
    with pytest.raises(LayoutInvalid, match=second):
        remove_bundle(layout, first)
    assert set(layout.list_blobs()) == before
    assert len(layout.read_index().manifests) == 2


@pytest.mark.parametrize("how", ["corrupt", "missing"])
def test_bundle_with_a_broken_manifest_can_be_removed(layout: Layout, how: str) -> None:
    first, second = (publish_sample(layout, version=version) for version in "12")
    if how == "corrupt":
        corrupt(layout, first)
    else:
        layout.delete_blob(first)
    remove_bundle(layout, first)
    assert not layout.has(first)
    open_bundle(layout, second).verify(BlobVerifier(None))


def test_manifest_of_another_kind_protects_its_blobs(layout: Layout) -> None:
    digest = publish_sample(layout)
    document = {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST_TYPE,
        "config": {"mediaType": "a/b", "digest": DIGESTS["tokenizer.json"], "size": 1},
        "layers": [],
    }
    stored = layout.put_blob(json.dumps(document).encode())
    list_manifest(layout, stored)
    assert remove_bundle(layout, digest).blob_count == 6
    assert set(layout.list_blobs()) == {stored.digest, DIGESTS["tokenizer.json"]}


def test_blobs_of_unfinished_bundles_are_removed_once_they_are_old(layout: Layout) -> None:
    digest = publish_sample(layout)
    old, young = (layout.put_blob(data) for data in (b"old", b"young"))
    before_s = time.time() - 100
    os.utime(layout.blob_path(old.digest), (before_s, before_s))
    assert remove_unneeded_blobs(layout, min_age_s=60) == FreedSpace(1, 3)
    assert layout.has(young.digest)
    open_bundle(layout, digest).verify(BlobVerifier(None))


def test_nothing_is_removed_where_it_is_unknown_what_is_needed(layout: Layout) -> None:
    corrupt(layout, publish_sample(layout))
    before = set(layout.list_blobs())
    with pytest.raises(LayoutInvalid):
        remove_unneeded_blobs(layout, min_age_s=0)
    assert set(layout.list_blobs()) == before
