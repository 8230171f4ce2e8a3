"""Writes one blob: hashes the bytes on their way to the disk, then makes the whole blob visible under its digest."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from bundle.digest import PREFIX
from bundle.errors import BlobCorrupt


class StoredBlob(NamedTuple):
    """A blob that a store holds."""

    digest: str
    size_bytes: int


#: Makes the context in which the blob of a digest gets its name, or is found to have it.
Placing = Callable[[str], AbstractContextManager[None]]


class BlobWriter:
    """A blob that is being written: a context manager that discards the blob unless it was committed.

    The file stays locked while it is open, which tells a sweep that its writer is alive.
    """

    def __init__(
        self,
        staging: Path,
        blobs: Path,
        *,
        placing: Placing,
        expected_digest: str | None = None,
        replace: bool = False,
    ) -> None:
        """Opens a new file.

        Args:
            staging: Directory of unfinished blobs, on the file system of `blobs`.
            placing: Excludes collections while the blob gets its name.
            expected_digest: Digest that the bytes must have; None accepts any bytes.
            replace: Replace a blob of that name, whose bytes are known to be wrong.
        """
        fd, path = tempfile.mkstemp(dir=staging)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._file = os.fdopen(fd, "wb")
        self._path = Path(path)
        self._blobs = blobs
        self._placing = placing
        self._expected_digest = expected_digest
        self._replace = replace
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes; returns their number."""
        self._sha256.update(data)
        count = self._file.write(data)
        self._size_bytes += count
        return count

    def commit(self) -> StoredBlob:
        """Makes the blob durable and visible, or discards bytes that have another digest. Takes no more bytes then."""
        digest = PREFIX + self._sha256.hexdigest()
        if self._expected_digest not in {None, digest}:
            raise BlobCorrupt(str(self._expected_digest), digest)
        self._file.flush()
        publish_file(self._file.fileno(), self._path, self._blobs, digest, placing=self._placing, replace=self._replace)
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


def publish_file(fd: int, staged: Path, blobs: Path, digest: str, *, placing: Placing, replace: bool = False) -> None:
    """Gives a complete file its name among the blobs, durably.

    If a blob of that name and size exists, it is kept instead, unless `replace` is set.
    """
    target = blobs / digest.removeprefix(PREFIX)
    size_bytes = os.fstat(fd).st_size
    is_durable = replace or not _is_blob(target, size_bytes)
    if is_durable:
        _make_durable(fd)
    with placing(digest):
        if not replace and _is_blob(target, size_bytes):
            staged.unlink()
        else:
            # Another process can have removed the blob that made this one superfluous.
            if not is_durable:
                _make_durable(fd)
            staged.replace(target)
    # Done for an existing blob too: its writer may not have reached this point.
    fsync_directory(blobs)


def _is_blob(path: Path, size_bytes: int) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size_bytes


def _make_durable(fd: int) -> None:
    # Blobs are immutable, and readable for other users, because a runtime may run as another user.
    os.fchmod(fd, 0o444)
    os.fsync(fd)


def fsync_directory(path: Path) -> None:
    """Makes renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
