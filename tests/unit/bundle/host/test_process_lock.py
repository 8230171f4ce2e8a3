import os
from pathlib import Path

import pytest

from bundle.host.process_lock import ProcessLock


def duplicate_descriptor(path: Path) -> int:
    """Opens a file a second time as a child does that inherits it: with the same lock."""
    (held,) = [entry.name for entry in os.scandir("/proc/self/fd") if Path(entry.path).resolve() == path.resolve()]
    return os.dup(int(held))


def test_one_lock_at_a_time(tmp_path: Path) -> None:
    first = ProcessLock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        ProcessLock(tmp_path / "lock")
    first.release()
    ProcessLock(tmp_path / "lock").release()


def test_a_released_lock_is_free_while_a_starting_child_has_the_file_open(tmp_path: Path) -> None:
    first = ProcessLock(tmp_path / "lock")
    inherited = duplicate_descriptor(tmp_path / "lock")
    first.release()
    ProcessLock(tmp_path / "lock").release()
    os.close(inherited)


def test_a_refused_lock_leaves_no_descriptor(tmp_path: Path) -> None:
    first = ProcessLock(tmp_path / "lock")
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            ProcessLock(tmp_path / "lock")
    os.close(duplicate_descriptor(tmp_path / "lock"))  # finds exactly one
    first.release()
