from pathlib import Path

import pytest

from bundle.errors import BlobCorrupt, BlobMissing, BundleNotFound, DigestInvalid
from bundle.store.blob_writer import BlobWriter
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import add_referrer, fallback_tag, list_referrers, read_referrer
from bundle.store.removal import Needs, collect_garbage
from bundle.store.transfer import Transfer, copy_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.samples import DIGESTS, FILES, publish_adapter, publish_sample
from tests.opened_files import record_opened_files

WEIGHTS = DIGESTS["weights/tp1_sharded_checkpoint.safetensors"]


@pytest.fixture
def source(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "target")


def copy(source: Layout, target: Layout, digest: str, **options: object) -> Transfer:
    return copy_bundle(source, target, digest, verifier=BlobVerifier(None), **options)  # type: ignore[arg-type]


def overwrite(layout: Layout, digest: str, data: bytes) -> None:
    layout.blob_path(digest).chmod(0o644)
    layout.blob_path(digest).write_bytes(data)


def flip(layout: Layout, digest: str) -> None:
    data = bytearray(layout.blob_path(digest).read_bytes())
    data[len(data) // 2] ^= 1
    overwrite(layout, digest, bytes(data))


def test_a_copy_is_the_bundle(source: Layout, target: Layout) -> None:
    digest = publish_sample(source, ref_name="tiny:v1")
    size_bytes = open_bundle(source, digest).size_bytes
    reported: list[tuple[int, int]] = []
    done = copy(source, target, digest, ref_name="prod", progress=lambda *bytes_: reported.append(bytes_))
    assert done == Transfer(digest, copied_blob_count=7, copied_size_bytes=size_bytes, present_blob_count=0)
    bundle = open_bundle(target, digest)
    bundle.verify(BlobVerifier(None))
    assert bundle.blobs == open_bundle(source, digest).blobs
    assert [entry.ref_name for entry in target.read_index().manifests] == ["prod"]
    assert (reported[0], reported[-1]) == ((0, size_bytes), (size_bytes, size_bytes))
    assert reported == sorted(reported)


def test_an_adapter_moves_and_stays_as_all_bundles_do(source: Layout, target: Layout) -> None:
    publish_sample(source)
    digest = publish_adapter(source)
    assert copy(source, target, digest).copied_blob_count == 4
    publish_sample(target)
    collect_garbage(target, lambda: Needs(bundles=frozenset({digest})))
    bundle = open_bundle(target, digest)
    bundle.verify(BlobVerifier(None))
    assert [adapter.name for adapter in bundle.manifest.adapters] == ["one"]
    assert set(target.list_blobs()) == {blob.digest for blob in bundle.blobs}


def test_only_what_is_missing_moves(source: Layout, target: Layout) -> None:
    publish_sample(target, version="1")
    digest = publish_sample(source, version="2")
    with record_opened_files() as opened:
        done = copy(source, target, digest)
    assert (done.copied_blob_count, done.present_blob_count) == (2, 5)
    blobs = source.root / "blobs" / "sha256"
    read = {file.path.name for file in opened if file.path.parent == blobs}
    # The two manifests; not a byte of what was there.
    assert read == {blob.removeprefix("sha256:") for blob in source.list_blobs() if blob not in DIGESTS.values()}
    assert copy(source, target, digest) == Transfer(digest, 0, 0, 7)


def test_what_was_copied_before_is_not_copied_again(
    source: Layout, target: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = publish_sample(source)
    commits = 0
    commit = BlobWriter.commit

    def fail_after_three(writer: BlobWriter) -> object:
        nonlocal commits
        commits += 1
        if commits > 3:
            raise OSError(28, "No space left on device")
        return commit(writer)

    monkeypatch.setattr(BlobWriter, "commit", fail_after_three)
    with pytest.raises(OSError, match="No space left"):
        copy(source, target, digest)
    monkeypatch.setattr(BlobWriter, "commit", commit)
    assert target.read_index().manifests == ()
    done = copy(source, target, digest)
    assert (done.copied_blob_count, done.present_blob_count) == (4, 3)


@pytest.mark.parametrize("title", [title for title, _, _ in FILES])
def test_a_corrupt_blob_is_named_and_nothing_becomes_visible(source: Layout, target: Layout, title: str) -> None:
    digest = publish_sample(source)
    flip(source, DIGESTS[title])
    with pytest.raises(BlobCorrupt) as caught:
        copy(source, target, digest, ref_name="prod")
    assert caught.value.metadata["digest"] == DIGESTS[title]
    assert caught.value.metadata["title"] == title
    assert target.read_index().manifests == ()
    assert not target.has(DIGESTS[title])
    assert not target.has(digest)


def test_corrupt_manifests_are_named(source: Layout, target: Layout) -> None:
    digest = publish_sample(source)
    for manifest in (open_bundle(source, digest).image.config.digest, digest):
        flip(source, manifest)
        with pytest.raises(BlobCorrupt, match=manifest):
            copy(source, target, digest)
    assert list(target.list_blobs()) == []


def test_a_blob_that_is_missing_is_named(source: Layout, target: Layout) -> None:
    digest = publish_sample(source)
    source.delete_blob(WEIGHTS)
    with pytest.raises(BlobMissing, match=WEIGHTS):
        copy(source, target, digest)
    with pytest.raises(BundleNotFound):
        copy(source, target, WEIGHTS)
    with pytest.raises(DigestInvalid):
        copy(source, target, "tiny:v1")


@pytest.mark.parametrize("data", [b"truncated", b"!" + FILES[3][2][1:]])
def test_a_blob_that_is_corrupt_in_the_target_is_replaced(source: Layout, target: Layout, data: bytes) -> None:
    publish_sample(target, version="1")
    overwrite(target, WEIGHTS, data)
    digest = publish_sample(source, version="2")
    assert copy(source, target, digest).copied_blob_count == 3
    open_bundle(target, digest).verify(BlobVerifier(None))


def test_present_blobs_are_hashed_once_and_copied_ones_never(source: Layout, target: Layout, tmp_path: Path) -> None:
    publish_sample(target, version="1")
    digest = publish_sample(source, version="2")
    verifier = BlobVerifier(tmp_path / "verified.sqlite")
    copy_bundle(source, target, digest, verifier=verifier)
    with record_opened_files() as opened:
        reported: list[int] = []
        open_bundle(target, digest).verify(verifier, reported.append)
    # At once, blob by blob: from what the verifier remembers.
    assert len(reported) == 7
    assert opened


def test_the_tag_moves_with_the_copy(source: Layout, target: Layout) -> None:
    old = publish_sample(target, version="1", ref_name="prod")
    digest = publish_sample(source, version="2")
    copy(source, target, digest, ref_name="prod")
    assert [(entry.ref_name, entry.digest) for entry in target.read_index().manifests] == [("prod", digest)]
    with pytest.raises(BundleNotFound):
        open_bundle(target, old)


def test_referrers_come_along_unless_they_are_left(source: Layout, target: Layout, tmp_path: Path) -> None:
    digest, other = (publish_sample(source, version=version) for version in "12")
    timings = add_referrer(source, digest, "a/timings", "text/plain", b"3 s", title="timings")
    signature = add_referrer(source, timings, "a/signature", "text/plain", b"signed", title="signature")
    add_referrer(source, other, "a/timings", "text/plain", b"4 s", title="timings")
    done = copy(source, target, digest)
    # Two manifests, two files and the empty config.
    assert done.copied_blob_count == 7 + 5
    assert [one.digest for one in list_referrers(target, digest)] == [timings]
    assert read_referrer(target, signature) == b"signed"
    assert {entry.ref_name for entry in target.read_index().manifests} == {
        "",
        fallback_tag(digest),
        fallback_tag(timings),
    }
    bare = Layout.create(tmp_path / "bare")
    assert copy(source, bare, digest, with_referrers=False).copied_blob_count == 7
    assert list_referrers(bare, digest) == ()


def test_a_corrupt_referrer_is_named_and_nothing_becomes_visible(source: Layout, target: Layout) -> None:
    digest = publish_sample(source)
    add_referrer(source, digest, "a/timings", "text/plain", b"3 s", title="timings")
    layer = next(blob for blob in source.list_blobs() if source.open_blob(blob).read() == b"3 s")
    flip(source, layer)
    with pytest.raises(BlobCorrupt, match=layer):
        copy(source, target, digest)
    assert target.read_index().manifests == ()


def test_a_collection_during_the_copy_takes_nothing_of_it(source: Layout, target: Layout) -> None:
    publish_sample(target)  # other bundles need most of its blobs
    digest = publish_sample(source, version="2")

    def collect(_done: int, _total: int) -> None:
        collect_garbage(target, Needs)

    copy(source, target, digest, ref_name="prod", progress=collect)
    open_bundle(target, digest).verify(BlobVerifier(None))
    assert collect_garbage(target, Needs).freed.blob_count == 0
