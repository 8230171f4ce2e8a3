"""What holds prompts, names or keys is its owner's alone, whatever the umask, and what exists is tightened."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bundle.host.file_modes import make_private_database, make_private_directory, open_private
from bundle.store.verification import BlobVerifier
from compiler_svc.database.engine import Database
from edge.logs import LogConfig, _open_file
from runtime_svc.deployments.records import RecordStore


@pytest.fixture(params=[0o022, 0o000], ids=["umask 022", "umask 000"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    former = os.umask(request.param)
    yield
    os.umask(former)


pytestmark = pytest.mark.usefixtures("umask")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes_of(folder: Path) -> dict[str, int]:
    return {path.name: mode_of(path) for path in folder.iterdir()}


def open_verified_blobs(folder: Path) -> Callable[[], None]:
    verifier = BlobVerifier(folder / "verified.db")
    (folder / "blob").touch(0o600)
    verifier.identify(folder / "blob")
    return lambda: None


#: File → what opens it in a folder, and gives what closes it.
OPENED: dict[str, Callable[[Path], Callable[[], None]]] = {
    "runtime.db": lambda folder: RecordStore(folder).close,
    "kiln.db": lambda folder: Database(f"sqlite:///{folder / 'kiln.db'}").close,
    "verified.db": open_verified_blobs,
    "runtime.log": lambda folder: _open_file(folder / "runtime.log", LogConfig()).close,
}


@pytest.mark.parametrize("name", OPENED)
def test_new_files_are_their_owners(tmp_path: Path, name: str) -> None:
    close = OPENED[name](tmp_path)
    found = modes_of(tmp_path)
    close()
    assert name in found
    private = {file: mode for file, mode in found.items() if file.startswith(name)}
    assert set(private.values()) == {0o600}, found
    if name == "kiln.db":
        assert {"kiln.db-wal", "kiln.db-shm"} <= private.keys()


@pytest.mark.parametrize("name", OPENED)
def test_files_of_an_earlier_release_are_tightened(tmp_path: Path, name: str) -> None:
    close = OPENED[name](tmp_path)
    left = [path for path in tmp_path.iterdir() if path.name.startswith(name)]
    if name == "runtime.log":
        left.append(tmp_path / "runtime.log.1")
        left[-1].touch()
    for path in left:
        path.chmod(0o644)
    again = OPENED[name](tmp_path) if name != "runtime.db" else None
    close()
    if again is None:  # one process has the directory at a time
        again = OPENED[name](tmp_path)
    assert {mode_of(path) for path in left if path.exists()} == {0o600}
    again()


def test_rotated_logs_are_their_owners(tmp_path: Path) -> None:
    handler = _open_file(tmp_path / "log", LogConfig(max_file_bytes=1, num_backups=2))
    handler.doRollover()  # type: ignore[attr-defined]
    handler.doRollover()  # type: ignore[attr-defined]
    handler.close()
    assert modes_of(tmp_path) == {"log": 0o600, "log.1": 0o600, "log.2": 0o600}


def test_directories_are_made_private_and_never_changed(tmp_path: Path) -> None:
    make_private_directory(tmp_path / "parent" / "new")
    assert mode_of(tmp_path / "parent" / "new") == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    make_private_directory(tmp_path / "shared")
    assert mode_of(tmp_path / "shared") == 0o750
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    make_private_directory(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_directory(tmp_path / "file")


def test_pipes_stay_as_they_are(tmp_path: Path) -> None:
    """A log may be one, or a device, which are not ours alone."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").chmod(0o622)
    os.close(open_private(str(tmp_path / "pipe"), os.O_RDWR))
    assert mode_of(tmp_path / "pipe") == 0o622


def test_locks_of_an_open_database_survive(tmp_path: Path) -> None:
    """A process that closes a file of SQLite's gives up SQLite's locks on it."""
    path = tmp_path / "database"
    first = sqlite3.connect(path)
    first.execute("CREATE TABLE t (x)")
    first.execute("BEGIN EXCLUSIVE")
    make_private_database(path)
    program = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('SELECT * FROM t')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "database is locked" in result.stderr
    first.close()
