import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import bundle.store.verification
from bundle.digest import sha256_bytes, sha256_stream
from bundle.errors import BlobCorrupt, BlobNotFound, DigestInvalid
from bundle.store.layout import Layout
from bundle.store.verification import BlobVerifier
from tests.repository import ROOT
from tests.running_time import running_time

DATA = b"weights" * 1000
DIGEST = sha256_bytes(DATA)


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def verifier(tmp_path: Path) -> BlobVerifier:
    return BlobVerifier(tmp_path / "cache.sqlite")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that were computed, in order."""
    digests: list[str] = []

    def record(*args: object) -> str:
        digests.append(sha256_stream(*args))  # type: ignore[arg-type]
        return digests[-1]

    monkeypatch.setattr(bundle.store.verification, "sha256_stream", record)
    return digests


def test_unchanged_blob_is_hashed_once(verifier: BlobVerifier, blob: Path, tmp_path: Path, hashed: list[str]) -> None:
    verifier.verify(blob, DIGEST)
    verifier.verify(blob, DIGEST)
    BlobVerifier(tmp_path / "cache.sqlite").verify(blob, DIGEST)
    assert hashed == [DIGEST]


def test_always_or_without_cache_every_verification_hashes(tmp_path: Path, blob: Path, hashed: list[str]) -> None:
    for _ in range(2):
        BlobVerifier(tmp_path / "cache.sqlite", always=True).verify(blob, DIGEST)
    BlobVerifier(tmp_path / "cache.sqlite").verify(blob, DIGEST)
    assert hashed == [DIGEST] * 2
    for _ in range(2):
        BlobVerifier(None).verify(blob, DIGEST)
    assert hashed == [DIGEST] * 4


def test_progress_is_the_size_whether_hashed_or_not(verifier: BlobVerifier, blob: Path) -> None:
    for _ in range(2):
        reported: list[int] = []
        verifier.verify(blob, DIGEST, progress=reported.append)
        assert sum(reported) == len(DATA)


@pytest.mark.parametrize("attempt", range(5))
def test_write_right_after_verification_is_noticed(verifier: BlobVerifier, blob: Path, attempt: int) -> None:
    blob.write_bytes(DATA)
    verifier.verify(blob, DIGEST)
    blob.write_bytes(DATA[:-1] + b"!")
    with pytest.raises(BlobCorrupt) as caught:
        verifier.verify(blob, DIGEST, "model.safetensors")
    actual = sha256_bytes(DATA[:-1] + b"!")
    assert caught.value.metadata == {"digest": DIGEST, "actual": actual, "title": "model.safetensors"}


def test_restored_times_do_not_hide_a_write(verifier: BlobVerifier, blob: Path) -> None:
    verifier.verify(blob, DIGEST)
    status = blob.stat()
    blob.write_bytes(b"!" + DATA[1:])
    os.utime(blob, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(BlobCorrupt):
        verifier.verify(blob, DIGEST)


def test_corrupt_blob_is_never_recorded(verifier: BlobVerifier, blob: Path, hashed: list[str]) -> None:
    other = sha256_bytes(b"other")
    for _ in range(2):
        with pytest.raises(BlobCorrupt):
            verifier.verify(blob, other)
    assert hashed == [DIGEST] * 2
    verifier.verify(blob, DIGEST)
    with pytest.raises(BlobCorrupt):
        verifier.verify(blob, other)


def test_blob_is_hashed_once_its_times_have_settled(
    verifier: BlobVerifier, blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write within the kernel tick of the last change leaves no trace in ctime."""
    ages_ns = []

    def record_age(*args: object) -> str:
        ages_ns.append(time.time_ns() - blob.stat().st_ctime_ns)
        return sha256_stream(*args)  # type: ignore[arg-type]

    verifier.verify(blob, DIGEST)  # makes the cache, which takes its time
    monkeypatch.setattr(bundle.store.verification, "sha256_stream", record_age)
    blob.write_bytes(DATA)
    verifier.verify(blob, DIGEST)
    assert ages_ns[0] >= 20_000_000


def test_blob_that_changes_while_it_is_hashed_is_hashed_again(
    verifier: BlobVerifier, blob: Path, hashed: list[str]
) -> None:
    def touch(_count: int) -> None:
        blob.touch()

    verifier.verify(blob, DIGEST, progress=touch)
    verifier.verify(blob, DIGEST)
    assert hashed == [DIGEST] * 2


def test_blob_of_a_clock_ahead_of_ours_is_hashed_every_time(
    verifier: BlobVerifier, blob: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 10**12)
    with running_time() as taken:
        verifier.verify(blob, DIGEST)
        verifier.verify(blob, DIGEST)
    assert hashed == [DIGEST] * 2
    assert taken.s < 5


def test_blob_hashed_while_written_need_not_be_hashed_again(
    verifier: BlobVerifier, tmp_path: Path, hashed: list[str]
) -> None:
    layout = Layout.create(tmp_path / "layout")
    stored = layout.put_blob(DATA)
    path = layout.blob_path(stored.digest)
    verifier.remember(path, stored.digest)
    verifier.verify(path, stored.digest)
    assert hashed == []


def test_inode_reused_by_another_file_is_hashed(verifier: BlobVerifier, blob: Path, hashed: list[str]) -> None:
    verifier.verify(blob, DIGEST)
    other = blob.with_name("other")
    other.write_bytes(DATA)
    other.replace(blob)
    verifier.verify(blob, DIGEST)
    assert hashed == [DIGEST] * 2


@pytest.mark.parametrize("kind", ["absent", "directory", "link", "pipe"])
def test_what_is_no_regular_file_is_not_found(verifier: BlobVerifier, blob: Path, kind: str) -> None:
    path = blob.with_name(kind)
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(blob)
    elif kind == "pipe":
        os.mkfifo(path)
    for ask in (verifier.verify, verifier.remember):
        with pytest.raises(BlobNotFound, match=DIGEST):
            ask(path, DIGEST)


def test_digest_is_checked_first(verifier: BlobVerifier, blob: Path) -> None:
    with pytest.raises(DigestInvalid):
        verifier.verify(blob, "sha256:x")


@pytest.mark.parametrize("content", [b"this is no database" * 100, b""])
def test_broken_cache_costs_time_and_not_safety(
    tmp_path: Path, blob: Path, content: bytes, hashed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache.sqlite").write_bytes(content)
    verifier = BlobVerifier(tmp_path / "cache.sqlite")
    verifier.verify(blob, DIGEST)
    assert hashed == [DIGEST]
    assert bool(caplog.records) == bool(content)
    blob.write_bytes(b"!")
    with pytest.raises(BlobCorrupt):
        verifier.verify(blob, DIGEST)


def test_cache_in_a_directory_that_is_missing_only_warns(
    tmp_path: Path, blob: Path, caplog: pytest.LogCaptureFixture
) -> None:
    BlobVerifier(tmp_path / "missing" / "cache.sqlite").verify(blob, DIGEST)
    assert "missing" in caplog.text


VERIFY_MANY = """
import sys
from pathlib import Path
from bundle.digest import sha256_bytes
from bundle.store.verification import BlobVerifier
cache, *blobs = map(Path, sys.argv[1:])
for _ in range(5):
    for blob in blobs:
        BlobVerifier(cache).verify(blob, sha256_bytes(blob.read_bytes()))
"""


def test_processes_and_threads_share_one_cache(tmp_path: Path, hashed: list[str]) -> None:
    blobs = [tmp_path / f"blob-{number}" for number in range(8)]
    for number, path in enumerate(blobs):
        path.write_bytes(bytes([number]) * 1000)
    cache = tmp_path / "cache.sqlite"
    command = [sys.executable, "-W", "error", "-c", VERIFY_MANY, str(cache), *map(str, blobs)]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)]
    verifier = BlobVerifier(cache)

    def verify_all() -> None:
        for path in blobs * 5:
            verifier.verify(path, sha256_bytes(path.read_bytes()))

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(verify_all) for _ in range(3)]:
            future.result()
    assert [process.communicate(timeout=60)[1] for process in processes] == [b""] * 3
    hashed.clear()
    for path in blobs:
        verifier.verify(path, sha256_bytes(path.read_bytes()))
    assert hashed == []


def test_files_of_unknown_digest_are_hashed_once(
    verifier: BlobVerifier, blob: Path, tmp_path: Path, hashed: list[str]
) -> None:
    """Also for the verification that follows, and not if they have changed."""
    assert [verifier.identify(blob) for _ in range(2)] == [DIGEST, DIGEST]
    verifier.verify(blob, DIGEST)
    assert hashed == [DIGEST]
    blob.write_bytes(DATA[:-1] + b"!")
    changed = sha256_bytes(DATA[:-1] + b"!")
    assert verifier.identify(blob) == changed
    assert BlobVerifier(None).identify(blob) == changed
    assert hashed == [DIGEST, changed, changed]
    with pytest.raises(BlobNotFound, match="absent"):
        verifier.identify(tmp_path / "absent")
