"""Behaviour of every blob store. Derive a test class, and give it a fixture `store`."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from bundle.blob_writer import StoredBlob
from bundle.digest import CHUNK_SIZE_BYTES, sha256_bytes
from bundle.errors import BlobCorrupt, BlobNotFound, DigestInvalid
from bundle.layout import Layout

ABSENT = "sha256:" + "0" * 64
NO_DIGESTS = (
    "",
    "sha256:",
    "sha256:../../etc/passwd",
    "sha256:" + "0" * 63,
    "sha256:" + "G" * 64,
    ABSENT + "\n",
    "../x",
)


class StoreSuite:
    @pytest.fixture
    def store(self) -> Layout:
        raise NotImplementedError

    @pytest.mark.parametrize("data", [b"", b"abc", bytes(CHUNK_SIZE_BYTES + 1)], ids=["empty", "small", "chunks"])
    def test_bytes_come_back_under_their_digest(self, store: Layout, data: bytes) -> None:
        stored = store.put_blob(data)
        assert stored == StoredBlob(sha256_bytes(data), len(data))
        assert store.has(stored.digest)
        assert store.stored(stored.digest) == stored
        with store.open_blob(stored.digest) as blob:
            assert blob.read() == data
        assert store.blob_path(stored.digest).read_bytes() == data

    def test_equal_bytes_are_stored_once(self, store: Layout) -> None:
        first = store.put_blob(b"same")
        inode = store.blob_path(first.digest).stat().st_ino
        assert store.put_blob(b"same") == first
        assert list(store.list_blobs()) == [first.digest]
        assert store.blob_path(first.digest).stat().st_ino == inode

    def test_blob_is_invisible_until_commit(self, store: Layout) -> None:
        digest = sha256_bytes(b"onetwo")
        with store.new_blob() as blob:
            blob.write(b"one")
            blob.write(memoryview(b"two"))
            assert not store.has(digest)
            assert list(store.list_blobs()) == []
            assert blob.commit() == StoredBlob(digest, 6)
            assert store.has(digest)

    def test_blob_without_commit_leaves_nothing(self, store: Layout) -> None:
        with store.new_blob() as blob:
            blob.write(b"abandoned")
        with suppress(ZeroDivisionError), store.new_blob() as blob:
            blob.write(b"failed")
            raise ZeroDivisionError
        assert list(store.list_blobs()) == []

    def test_expected_digest_is_enforced(self, store: Layout) -> None:
        expected = sha256_bytes(b"expected")
        with store.new_blob(expected_digest=expected) as blob:
            blob.write(b"something else")
            with pytest.raises(BlobCorrupt) as caught:
                blob.commit()
        assert caught.value.metadata["digest"] == expected
        assert caught.value.metadata["actual"] == sha256_bytes(b"something else")
        assert list(store.list_blobs()) == []
        with store.new_blob(expected_digest=expected) as blob:
            blob.write(b"expected")
            blob.commit()
        assert store.has(expected)

    def test_copying_a_file_leaves_it(self, store: Layout, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"file" * CHUNK_SIZE_BYTES)
        stored = store.ingest_file(source)
        assert stored == StoredBlob(sha256_bytes(b"file" * CHUNK_SIZE_BYTES), 4 * CHUNK_SIZE_BYTES)
        source.write_bytes(b"changed afterwards")
        assert store.blob_path(stored.digest).stat().st_size == stored.size_bytes

    def test_moving_a_file_takes_it(self, store: Layout, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"file")
        stored = store.ingest_file(source, move=True)
        assert stored == StoredBlob(sha256_bytes(b"file"), 4)
        assert not source.exists()
        assert store.blob_path(stored.digest).read_bytes() == b"file"
        source.write_bytes(b"file")
        assert store.ingest_file(source, move=True) == stored
        assert not source.exists()

    def test_deleted_blob_is_gone_but_stays_open(self, store: Layout) -> None:
        digest = store.put_blob(b"soon gone").digest
        with store.open_blob(digest) as blob:
            assert store.delete_blob(digest) == 9
            assert blob.read() == b"soon gone"
        assert not store.has(digest)
        assert list(store.list_blobs()) == []

    def test_absent_blob_is_named(self, store: Layout) -> None:
        assert not store.has(ABSENT)
        for access in (store.stored, store.open_blob, store.blob_path, store.delete_blob):
            with pytest.raises(BlobNotFound, match=ABSENT):
                access(ABSENT)

    @pytest.mark.parametrize("text", NO_DIGESTS)
    def test_what_is_no_digest_never_becomes_a_path(self, store: Layout, text: str) -> None:
        for access in (store.has, store.stored, store.open_blob, store.blob_path, store.delete_blob):
            with pytest.raises(DigestInvalid):
                access(text)
        with pytest.raises(DigestInvalid):
            store.new_blob(expected_digest=text)

    def test_threads_may_write_at_once(self, store: Layout) -> None:
        contents = [bytes([n % 5]) * (1000 + n % 5) for n in range(40)]
        results: list[StoredBlob] = []
        threads = [threading.Thread(target=lambda d=data: results.append(store.put_blob(d))) for data in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == sorted(StoredBlob(sha256_bytes(data), len(data)) for data in contents)
        assert set(store.list_blobs()) == {sha256_bytes(data) for data in contents}
