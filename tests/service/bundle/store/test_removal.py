import fcntl
import json
import subprocess
import sys

import pytest

from bundle.digest import sha256_bytes
from bundle.errors import BundleNotFound, DigestInvalid, LayoutInvalid
from bundle.store.layout import Layout
from bundle.store.oci import IMAGE_MANIFEST_TYPE, INDEX_TYPE, Index
from bundle.store.reader import open_bundle
from bundle.store.removal import Collected, FreedSpace, Needs, collect_garbage, remove_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.samples import DIGESTS, list_manifest, publish_sample, sample_manifest, unlist_manifest
from tests.hang_guard import HANG_S
from tests.repository import ROOT

#: A manifest that is no bundle.
FOREIGN = {
    "schemaVersion": 2,
    "mediaType": IMAGE_MANIFEST_TYPE,
    "config": {"mediaType": "a/b", "digest": DIGESTS["tokenizer.json"], "size": 1},
    "layers": [],
}


def corrupt(layout: Layout, digest: str) -> None:
    path = layout.blob_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"{}")


def test_a_bundle_takes_the_blobs_that_no_other_bundle_has_and_leaves_those_of_nobody(layout: Layout) -> None:
    being_written = layout.put_blob(b"of a bundle that is on its way").digest
    first, second = (publish_sample(layout, version=version, ref_name=f"tiny:v{version}") for version in "12")
    publish_sample(layout, version="2", ref_name="tiny:v3")
    sizes = [layout.stored(digest).size_bytes for digest in (first, sha256_bytes(sample_manifest().to_json()))]
    assert remove_bundle(layout, first) == FreedSpace(2, sum(sizes))
    with pytest.raises(BundleNotFound):
        open_bundle(layout, first)
    bundle = open_bundle(layout, second)
    bundle.verify(BlobVerifier(None))
    assert remove_bundle(layout, second) == FreedSpace(7, bundle.size_bytes)
    assert list(layout.list_blobs()) == [being_written]
    assert layout.read_index().manifests == ()


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


def test_nothing_goes_where_another_manifest_cannot_be_read(layout: Layout) -> None:
    first, second = (publish_sample(layout, version=version) for version in "12")
    corrupt(layout, second)
    before = set(layout.list_blobs())
    with pytest.raises(LayoutInvalid, match=second):
        remove_bundle(layout, first)
    with pytest.raises(LayoutInvalid, match=second):
        collect_garbage(layout, lambda: Needs(bundles=frozenset({first, second})))
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
    stored = layout.put_blob(json.dumps(FOREIGN).encode())
    list_manifest(layout, stored)
    assert remove_bundle(layout, digest).blob_count == 6
    assert set(layout.list_blobs()) == {stored.digest, DIGESTS["tokenizer.json"]}


def test_what_a_living_writer_needs_is_not_removed(layout: Layout) -> None:
    digest = publish_sample(layout)
    with layout.pinning() as writer:
        assert writer.pin(DIGESTS["tokenizer.json"])
        assert remove_bundle(layout, digest).blob_count == 6
        assert layout.has(DIGESTS["tokenizer.json"])
    with layout.pinning() as writer:
        # The same bundle once more, found and made visible by a writer that is not done with it.
        again = publish_sample(writer)
        assert remove_bundle(layout, again) == FreedSpace(0, 0)
        open_bundle(layout, again).verify(BlobVerifier(None))
    assert remove_bundle(layout, again).blob_count == 7


def test_what_is_needed_otherwise_is_not_removed(layout: Layout) -> None:
    digest = publish_sample(layout)
    assert remove_bundle(layout, digest, lambda: Needs(bundles=frozenset({digest}))) == FreedSpace(0, 0)
    open_bundle(layout, digest).verify(BlobVerifier(None))
    executable = DIGESTS["executables/token_generation_16.so"]
    assert remove_bundle(layout, digest, lambda: Needs(blobs=frozenset({executable}))).blob_count == 6
    assert list(layout.list_blobs()) == [executable]


class TestCollection:
    def test_takes_what_nothing_names_and_tells(self, layout: Layout) -> None:
        named, unnamed = (publish_sample(layout, version=version) for version in "12")
        of_unnamed = set(layout.list_blobs()) - {blob.digest for blob in open_bundle(layout, named).blobs}
        loose = layout.put_blob(b"of a bundle that was never finished").digest
        sizes = {digest: layout.stored(digest).size_bytes for digest in layout.list_blobs()}
        gone = {*of_unnamed, loose}
        expected = Collected(
            bundle_count=1,
            freed=FreedSpace(3, sum(sizes[digest] for digest in gone)),
            kept=FreedSpace(7, sum(sizes.values()) - sum(sizes[digest] for digest in gone)),
        )

        def needs() -> Needs:
            return Needs(bundles=frozenset({named}))

        assert collect_garbage(layout, needs, dry_run=True) == expected
        assert set(layout.list_blobs()) == sizes.keys()
        assert open_bundle(layout, unnamed)
        assert collect_garbage(layout, needs) == expected
        assert set(layout.list_blobs()) == sizes.keys() - gone
        open_bundle(layout, named).verify(BlobVerifier(None))
        with pytest.raises(BundleNotFound):
            open_bundle(layout, unnamed)
        assert collect_garbage(layout, needs).freed == FreedSpace(0, 0)

    def test_leaves_tagged_bundles_and_foreign_manifests(self, layout: Layout) -> None:
        tagged = publish_sample(layout, ref_name="tiny:v1")
        publish_sample(layout)  # a second entry of the same bundle, without tag
        foreign = list_manifest(layout, layout.put_blob(json.dumps(FOREIGN).encode()))
        collected = collect_garbage(layout, Needs)
        assert (collected.bundle_count, collected.freed.blob_count) == (0, 0)
        assert layout.has(foreign.digest)
        open_bundle(layout, tagged).verify(BlobVerifier(None))

    def test_leaves_what_living_writers_wrote_or_found_and_takes_it_afterwards(self, layout: Layout) -> None:
        found = layout.put_blob(b"found").digest
        with layout.pinning() as writer:
            written = writer.put_blob(b"written").digest
            assert writer.pin(found)
            assert not writer.pin(sha256_bytes(b"absent"))
            bundle = publish_sample(writer)
            assert collect_garbage(layout, Needs).kept.blob_count == 9
            open_bundle(layout, bundle).verify(BlobVerifier(None))
        assert layout.read_pins() == frozenset()
        assert collect_garbage(layout, Needs).freed.blob_count == 9
        assert not layout.has(written)

    def test_pins_of_a_killed_writer_end_with_it(self, layout: Layout) -> None:
        code = "import os, sys; from bundle.store.layout import Layout; from pathlib import Path\n"
        code += "with Layout(Path(sys.argv[1])).pinning() as writer:\n"
        code += "    print(writer.put_blob(b'written').digest, flush=True); sys.stdin.read()\n"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(layout.root)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            digest = writer.stdout.readline().decode().strip()
            assert layout.read_pins() == {digest}
            assert collect_garbage(layout, Needs).freed.blob_count == 0
            writer.kill()
            writer.wait(HANG_S)
            assert collect_garbage(layout, Needs).freed.blob_count == 1
        assert list((layout.root / ".kiln" / "pins").iterdir()) == []

    def test_needs_are_asked_for_when_the_pins_have_been_read(self, layout: Layout) -> None:
        """A writer that names its bundle and then lets its pins go is seen one way or the other."""
        named: set[str] = set()
        with layout.pinning() as writer:
            bundle = publish_sample(writer)
            named.add(bundle)
        asked: list[bool] = []

        def needs() -> Needs:
            with (layout.root / ".kiln" / "lock").open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            asked.append(True)
            return Needs(bundles=frozenset(named))

        collect_garbage(layout, needs)
        assert asked == [True]
        open_bundle(layout, bundle)


def test_unfinished_blobs_of_dead_writers_are_collected(layout: Layout) -> None:
    staging = layout.root / ".kiln" / "staging"
    left = staging / "left-by-a-killed-process"
    left.write_bytes(b"half a blob")
    with layout.new_blob() as blob:
        blob.write(b"alive")
        collect_garbage(layout, Needs, dry_run=True)
        assert left.exists()
        collect_garbage(layout, Needs)
        assert not left.exists()
        assert layout.has(blob.commit().digest)
