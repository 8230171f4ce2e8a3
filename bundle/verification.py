"""Verifying blobs before they are mapped or run, without hashing twice what has not changed since."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Final

from bundle.digest import Progress, parse_digest, sha256_stream
from bundle.errors import BlobCorrupt, BlobNotFound

_log = logging.getLogger(__name__)

# ctime moves with the kernel's tick, 10 ms at worst: a second write within the tick of the first would not show.
SETTLE_TIME_NS: Final = 50_000_000

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS verified (
    device INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (device, inode)
) WITHOUT ROWID
"""


class BlobVerifier:
    """Compares blobs with their digests, and remembers which file, unchanged since, had which digest.

    Threads and processes may share the cache. A cache that cannot be read or written costs time, never safety.
    """

    def __init__(self, cache_path: Path | None, *, always: bool = False) -> None:
        """Opens or makes the cache.

        Args:
            cache_path: SQLite file, None for no cache.
            always: Hash every time, whatever the cache knows.
        """
        self._cache_path = cache_path
        self._always = always

    def verify(self, path: Path, digest: str, title: str = "", progress: Progress | None = None) -> None:
        """Makes sure that a file has the bytes of a digest.

        Args:
            path: The file.
            digest: Digest that it must have.
            title: Name for people, for the error.
            progress: Receives the file's size in total, at once where it need not be hashed.

        Raises:
            BlobCorrupt: It has other bytes.
            BlobNotFound: There is no such regular file.
            DigestInvalid: `digest` is none.
        """
        parse_digest(digest)
        with _open_regular(path, digest) as file:
            if not self._always and self._is_recorded(os.fstat(file.fileno()), digest):
                if progress is not None:
                    progress(os.fstat(file.fileno()).st_size)
                return
            status = self._settle(file)
            actual = sha256_stream(file, progress)
            if actual != digest:
                raise BlobCorrupt(digest, actual, title)
            self._record(status, digest)

    def remember(self, path: Path, digest: str) -> None:
        """Records a blob whose bytes were hashed while they were written, and that nobody has touched since.

        Raises:
            BlobNotFound: There is no such regular file.
        """
        with _open_regular(path, digest) as file:
            self._record(self._settle(file), digest)

    def _settle(self, file: FileIO) -> os.stat_result | None:
        """Waits until every later write will show in the file's ctime; None where that cannot be said."""
        if self._cache_path is None:
            return None
        age_ns = time.time_ns() - os.fstat(file.fileno()).st_ctime_ns
        # At most once: the file's server may have another clock.
        time.sleep(min(max(0, SETTLE_TIME_NS - age_ns), SETTLE_TIME_NS) / 1e9)
        status = os.fstat(file.fileno())
        return status if time.time_ns() - status.st_ctime_ns >= SETTLE_TIME_NS else None

    def _is_recorded(self, status: os.stat_result, digest: str) -> bool:
        row = (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns, digest)
        query = "SELECT 1 FROM verified WHERE (device, inode, size_bytes, ctime_ns, digest) = (?, ?, ?, ?, ?)"
        return self._execute(query, row) is not None

    def _record(self, status: os.stat_result | None, digest: str) -> None:
        if status is not None:
            row = (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns, digest)
            self._execute("INSERT OR REPLACE INTO verified VALUES (?, ?, ?, ?, ?)", row)

    def _execute(self, statement: str, row: tuple[int, int, int, int, str]) -> object:
        if self._cache_path is None:
            return None
        try:
            with closing(sqlite3.connect(self._cache_path, timeout=10)) as database, database:
                database.execute(_SCHEMA)
                return database.execute(statement, row).fetchone()
        except sqlite3.Error as error:
            _log.warning("verified-blob cache %s is of no use: %s", self._cache_path, error)
            return None


def _open_regular(path: Path, digest: str) -> FileIO:
    try:
        # Looked at before it is opened, because opening a pipe would wait for a writer.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BlobNotFound(digest)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise BlobNotFound(digest) from error
    return os.fdopen(fd, "rb", buffering=0)
