import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from bundle.digest import sha256_bytes, sha256_file
from compiler_svc.database.engine import Database
from compiler_svc.database.file_digests import FileDigests


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def later() -> int:
    return time.time_ns() + 5_000_000_000


def test_a_file_is_hashed_once(database: Database, tmp_path: Path, later: int) -> None:
    path = write(tmp_path / "a", b"data")
    digests = FileDigests(database)
    with patch("compiler_svc.database.file_digests.time.time_ns", return_value=later):
        assert digests.digest_file(path) == sha256_bytes(b"data")
        with patch("compiler_svc.database.file_digests.sha256_file", side_effect=AssertionError("hashed again")):
            assert digests.digest_file(path) == sha256_bytes(b"data")


def test_a_changed_file_is_hashed_again(database: Database, tmp_path: Path, later: int) -> None:
    path = write(tmp_path / "a", b"data")
    digests = FileDigests(database)
    with patch("compiler_svc.database.file_digests.time.time_ns", return_value=later):
        digests.digest_file(path)
        before = path.stat()
        path.write_bytes(b"atad")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert digests.digest_file(path) == sha256_bytes(b"atad")


def test_a_file_that_just_changed_is_not_remembered(database: Database, tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"data")
    digests = FileDigests(database)
    digests.digest_file(path)
    with patch("compiler_svc.database.file_digests.sha256_file", side_effect=sha256_file) as hashed:
        digests.digest_file(path)
    assert hashed.call_count == 1


def test_progress_may_give_up(database: Database, tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"data")

    def give_up(_size_bytes: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        FileDigests(database).digest_file(path, give_up)
