"""Pins: the digests that a writer at work relies on, listed in a file that it holds locked as long as it lives.

A collection reads the files of living writers, and removes those of the dead. So a blob that no manifest refers to yet
stays, however long its writer takes, and is garbage the moment the writer is killed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from bundle.digest import is_digest


class PinFile:
    """The pins of one writer."""

    def __init__(self, directory: Path) -> None:
        """Makes an empty file; the caller excludes `read_pins` meanwhile."""
        # Unbuffered and close-on-exec: what a killed process pinned was written, and its children hold nothing.
        self._fd, name = tempfile.mkstemp(dir=directory)
        self._path = Path(name)
        # Readable for other users: a collector may run under another one.
        os.fchmod(self._fd, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def add(self, digest: str) -> None:
        """Pins a digest; the caller excludes `read_pins` meanwhile."""
        os.write(self._fd, f"{digest}\n".encode())

    def close(self) -> None:
        """Ends all pins."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def read_pins(directory: Path) -> frozenset[str]:
    """Digests that living writers have pinned; the caller excludes writers meanwhile."""
    pinned: set[str] = set()
    for path in directory.iterdir():
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pinned |= {line for line in file.read().decode("ascii", "replace").splitlines() if is_digest(line)}
            else:
                path.unlink()
    return frozenset(pinned)
