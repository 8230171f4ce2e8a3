"""A file that one process at a time holds locked."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class ProcessLock:
    """Holds a file locked until `release`, or until the process dies."""

    def __init__(self, path: Path) -> None:
        """Locks a file, and makes it if it does not exist; raises BlockingIOError if it is locked already."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Unlocks the file at once."""
        # Closing would not do: a child that another thread is starting has the file open until it executes its program.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
