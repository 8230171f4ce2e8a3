"""Writing one blob: bytes are hashed on their way to the disk and become visible under their digest, whole or not at
all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from bundle.digest import PREFIX
from bundle.errors import BlobCorrupt


class StoredBlob(NamedTuple):
    """A blob that a store holds."""

    digest: str
    size_bytes: int


class BlobWriter:
    """A blob that is being written: a context manager that discards what was not committed.

    The file is locked as long as it is open, which tells a sweep that its writer is alive.
    """

    def __init__(self, staging: Path, blobs: Path, *, expected_digest: str | None = None) -> None:
        """Opens a new file.

        Args:
            staging: Directory of unfinished blobs, on the file system of `blobs`.
            blobs: Directory of blobs, named by their hexadecimal digits.
            expected_digest: What the bytes must hash to, None where any are welcome.
        """
        fd, path = tempfile.mkstemp(dir=staging)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._file = os.fdopen(fd, "wb")
        self._path = Path(path)
        self._blobs = blobs
        self._expected_digest = expected_digest
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes; returns how many."""
        self._sha256.update(data)
        count = self._file.write(data)
        self._size_bytes += count
        return count

    def commit(self) -> StoredBlob:
        """Makes the blob durable and visible. Nothing can be written after it.

        Raises:
            BlobCorrupt: The bytes do not have the expected digest; they are discarded.
        """
        digest = PREFIX + self._sha256.hexdigest()
        if self._expected_digest not in {None, digest}:
            raise BlobCorrupt(str(self._expected_digest), digest)
        self._file.flush()
        publish_file(self._file.fileno(), self._path, self._blobs / digest.removeprefix(PREFIX))
        self._file.close()
        return StoredBlob(digest, self._size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def publish_file(fd: int, staged: Path, target: Path) -> None:
    """Gives a complete file its name among the blobs, durably. A blob of that name and size is kept instead."""
    if target.is_file() and not target.is_symlink() and target.stat().st_size == os.fstat(fd).st_size:
        staged.unlink()
    else:
        # Blobs are immutable, and readable for other users: a runtime may run under another one.
        os.fchmod(fd, 0o444)
        os.fsync(fd)
        staged.replace(target)
    # Also where the blob was there: its writer may not have come this far.
    fsync_directory(target.parent)


def fsync_directory(path: Path) -> None:
    """Makes renames in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
