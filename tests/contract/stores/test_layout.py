import fcntl
import json
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from bundle.digest import CHUNK_SIZE_BYTES, sha256_bytes
from bundle.errors import BlobCorrupt, BlobNotFound, LayoutInvalid
from bundle.store.blob_writer import StoredBlob
from bundle.store.layout import Layout
from tests.bundles.samples import list_manifest, put_chunks
from tests.opened_files import record_opened_files

ABSENT = "sha256:" + "0" * 64


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "layout")


@pytest.mark.parametrize("data", [b"", b"abc", bytes(CHUNK_SIZE_BYTES + 1)], ids=["empty", "small", "chunks"])
def test_bytes_come_back_under_their_digest(layout: Layout, data: bytes) -> None:
    stored = layout.put_blob(data)
    assert stored == StoredBlob(sha256_bytes(data), len(data))
    assert layout.has(stored.digest)
    assert layout.stored(stored.digest) == stored
    with layout.open_blob(stored.digest) as blob:
        assert blob.read() == data
    assert layout.blob_path(stored.digest).read_bytes() == data


def test_equal_bytes_are_stored_once(layout: Layout) -> None:
    first = layout.put_blob(b"same")
    inode = layout.blob_path(first.digest).stat().st_ino
    assert layout.put_blob(b"same") == first
    assert list(layout.list_blobs()) == [first.digest]
    assert layout.blob_path(first.digest).stat().st_ino == inode


def test_blob_is_invisible_until_commit(layout: Layout) -> None:
    digest = sha256_bytes(b"onetwo")
    with layout.new_blob() as blob:
        blob.write(b"one")
        blob.write(memoryview(b"two"))
        assert not layout.has(digest)
        assert list(layout.list_blobs()) == []
        assert blob.commit() == StoredBlob(digest, 6)
        assert layout.has(digest)


def test_blob_without_commit_leaves_nothing(layout: Layout) -> None:
    with layout.new_blob() as blob:
        blob.write(b"abandoned")
    with suppress(ZeroDivisionError), layout.new_blob() as blob:
        blob.write(b"failed")
        raise ZeroDivisionError
    assert list(layout.list_blobs()) == []


def test_expected_digest_is_enforced(layout: Layout) -> None:
    expected = sha256_bytes(b"expected")
    with layout.new_blob(expected_digest=expected) as blob:
        blob.write(b"something else")
        with pytest.raises(BlobCorrupt) as caught:
            blob.commit()
    assert caught.value.metadata["digest"] == expected
    assert caught.value.metadata["actual"] == sha256_bytes(b"something else")
    assert list(layout.list_blobs()) == []
    with layout.new_blob(expected_digest=expected) as blob:
        blob.write(b"expected")
        blob.commit()
    assert layout.has(expected)


def test_copying_a_file_leaves_it(layout: Layout, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"file" * CHUNK_SIZE_BYTES)
    stored = layout.ingest_file(source)
    assert stored == StoredBlob(sha256_bytes(b"file" * CHUNK_SIZE_BYTES), 4 * CHUNK_SIZE_BYTES)
    source.write_bytes(b"changed afterwards")
    assert layout.blob_path(stored.digest).stat().st_size == stored.size_bytes


def test_moving_a_file_takes_it(layout: Layout, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"file")
    stored = layout.ingest_file(source, move=True)
    assert stored == StoredBlob(sha256_bytes(b"file"), 4)
    assert not source.exists()
    assert layout.blob_path(stored.digest).read_bytes() == b"file"
    source.write_bytes(b"file")
    assert layout.ingest_file(source, move=True) == stored
    assert not source.exists()


def test_deleted_blob_is_gone_but_stays_open(layout: Layout) -> None:
    digest = layout.put_blob(b"soon gone").digest
    with layout.open_blob(digest) as blob:
        assert layout.delete_blob(digest) == 9
        assert blob.read() == b"soon gone"
    assert not layout.has(digest)
    assert list(layout.list_blobs()) == []


def test_absent_blob_is_named(layout: Layout) -> None:
    assert not layout.has(ABSENT)
    for access in (layout.stored, layout.open_blob, layout.blob_path, layout.delete_blob):
        with pytest.raises(BlobNotFound, match=ABSENT):
            access(ABSENT)


def test_threads_may_write_at_once(layout: Layout) -> None:
    contents = [bytes([n % 5]) * (1000 + n % 5) for n in range(40)]
    results: list[StoredBlob] = []
    threads = [threading.Thread(target=lambda d=data: results.append(layout.put_blob(d))) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(StoredBlob(sha256_bytes(data), len(data)) for data in contents)
    assert set(layout.list_blobs()) == {sha256_bytes(data) for data in contents}


def test_directory_is_an_oci_image_layout(layout: Layout) -> None:
    assert json.loads((layout.root / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((layout.root / "index.json").read_bytes())
    assert index == {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}
    digest = layout.put_blob(b"abc").digest
    assert (layout.root / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes() == b"abc"


def test_creating_twice_keeps_what_is_there(layout: Layout) -> None:
    list_manifest(layout, layout.put_blob(b"{}"))
    again = Layout.create(layout.root)
    assert again.read_index() == layout.read_index()
    assert len(again.read_index().manifests) == 1


def test_blobs_are_read_only_and_readable_by_others(layout: Layout, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"moved")
    source.chmod(0o600)
    for stored in (layout.put_blob(b"put"), put_chunks(layout, b"chunks", 2), layout.ingest_file(source, move=True)):
        assert stat.S_IMODE(layout.blob_path(stored.digest).stat().st_mode) == 0o444


def test_moving_renames_within_the_file_system(layout: Layout, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    inode = source.stat().st_ino
    assert layout.blob_path(layout.ingest_file(source, move=True).digest).stat().st_ino == inode


def test_moving_copies_where_the_file_system_ends(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == source:
            raise OSError(18, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    stored = layout.ingest_file(source, move=True)
    assert layout.blob_path(stored.digest).read_bytes() == b"weights"
    assert not source.exists()
    assert list((layout.root / ".kiln" / "staging").iterdir()) == []


def test_moving_a_symbolic_link_is_refused(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        layout.ingest_file(tmp_path / "link", move=True)


def test_blob_that_is_a_symbolic_link_or_directory_is_not_there(layout: Layout, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    blobs = layout.root / "blobs" / "sha256"
    link, directory = sha256_bytes(b"secret"), sha256_bytes(b"directory")
    (blobs / link[7:]).symlink_to(secret)
    (blobs / directory[7:]).mkdir()
    for digest in (link, directory):
        assert not layout.has(digest)
        with pytest.raises(BlobNotFound):
            layout.open_blob(digest)
    assert list(layout.list_blobs()) == []


def test_strange_files_among_the_blobs_are_not_listed(layout: Layout) -> None:
    digest = layout.put_blob(b"abc").digest
    (layout.root / "blobs" / "sha256" / "README").write_text("hello")
    assert list(layout.list_blobs()) == [digest]


def test_truncated_blob_is_replaced_by_whole_bytes(layout: Layout) -> None:
    digest = layout.put_blob(b"whole").digest
    path = layout.blob_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"wh")
    layout.put_blob(b"whole")
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("oci-layout", None),
        ("oci-layout", b"{}"),
        ("oci-layout", b'{"imageLayoutVersion":"2.0.0"}'),
        ("index.json", None),
        ("index.json", b""),
        ("index.json", b'{"schemaVersion":2,"manifests":[{}]}'),
        ("index.json", b'{"schemaVersion":1,"manifests":[]}'),
    ],
)
def test_broken_layout_is_named(layout: Layout, file: str, data: bytes | None) -> None:
    path = layout.root / file
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(LayoutInvalid) as caught:
        Layout(layout.root).read_index()
    assert caught.value.metadata["path"] == f"{layout.root.name}/{file}"


def test_opening_what_is_not_there_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(LayoutInvalid, match="No such file"):
        Layout(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_reading_opens_nothing_for_writing(layout: Layout) -> None:
    digest = layout.put_blob(b"abc").digest
    list_manifest(layout, layout.put_blob(b"{}"))
    with record_opened_files() as opened:
        reader = Layout(layout.root)
        assert reader.has(digest)
        assert len(reader.read_index().manifests) == 1
        assert reader.open_blob(digest).read() == b"abc"
    assert [file.path.name for file in opened] == ["oci-layout", "index.json", digest.removeprefix("sha256:")]
    assert not any(file.flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for file in opened)


def test_creating_sweeps_what_dead_writers_left_and_spares_the_living(layout: Layout) -> None:
    staging = layout.root / ".kiln" / "staging"
    (staging / "left-by-a-killed-process").write_bytes(b"half a blob")
    with layout.new_blob() as blob:
        blob.write(b"alive")
        Layout.create(layout.root)
        assert len(list(staging.iterdir())) == 1
        assert layout.has(blob.commit().digest)
    assert list(staging.iterdir()) == []


def test_index_changes_wait_for_the_lock(layout: Layout) -> None:
    with layout.lock(), (layout.root / ".kiln" / "lock").open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (layout.root / ".kiln" / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_names_appear_after_their_bytes_are_on_the_disk(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(fd: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name}")
        fsync(fd)

    def record_replace(path: Path, target: Path) -> Path:
        steps.append(f"rename {path.name} {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    digest = layout.put_blob(b"{}").digest
    staged = steps[0].removeprefix("sync ")
    assert steps == [f"sync {staged}", f"rename {staged} {digest.removeprefix('sha256:')}", "sync sha256"]
    steps.clear()
    list_manifest(layout, layout.stored(digest))
    assert steps == ["sync .index.json.new", "rename .index.json.new index.json", "sync layout"]
