"""Verifies blobs before they are mapped or run, without hashing an unchanged file twice."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import AbstractContextManager, closing, suppress
from io import FileIO
from pathlib import Path
from typing import Final

from bundle.digest import Progress, parse_digest, sha256_stream
from bundle.errors import BlobCorrupt, BlobNotFound
from bundle.host.file_modes import make_private_database
from bundle.host.reading import open_regular, reading

_log = logging.getLogger(__name__)

# ctime advances with the kernel's tick, 10 ms at worst: a second write in the same tick would not change it.
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
    """Compares blobs with their digests, and caches the digests of files that have not changed since.

    Threads and processes may share the cache. If the cache cannot be read or written, blobs are hashed again.
    """

    def __init__(self, cache_path: Path | None, *, always: bool = False) -> None:
        """Opens or creates the cache, a SQLite file of its owner alone. With `always`, it hashes every time."""
        self._cache_path = cache_path
        self._always = always
        if cache_path is not None:
            with suppress(OSError):  # then it cannot be written either, which `_execute` reports
                make_private_database(cache_path)

    def verify(self, path: Path, digest: str, title: str = "", progress: Progress | None = None) -> None:
        """Verifies that the bytes of a file have a digest.

        `progress` receives the file's size in total, in one call if the file need not be hashed.
        """
        parse_digest(digest)
        with _reading(digest), open_regular(path) as file:
            if not self._always and self._is_recorded(os.fstat(file.fileno()), digest):
                if progress is not None:
                    progress(os.fstat(file.fileno()).st_size)
                return
            status = self._settle(file)
            actual = sha256_stream(file, progress)
            if actual != digest:
                raise BlobCorrupt(digest, actual, title)
            self._record(status, digest)

    def identify(self, path: Path) -> str:
        """Returns the digest of a file's bytes. Hashes a file that has not changed since only the first time."""
        with _reading(str(path)), open_regular(path) as file:
            status = os.fstat(file.fileno())
            row = self._execute(
                "SELECT digest FROM verified WHERE (device, inode, size_bytes, ctime_ns) = (?, ?, ?, ?)",
                (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns),
            )
            if row is not None:
                return str(row[0])
            settled = self._settle(file)
            digest = sha256_stream(file)
            self._record(settled, digest)
            return digest

    def remember(self, path: Path, digest: str) -> None:
        """Records a blob whose bytes were hashed while they were written, and which has not changed since."""
        with _reading(digest), open_regular(path) as file:
            self._record(self._settle(file), digest)

    def _settle(self, file: FileIO) -> os.stat_result | None:
        """Waits until every later write must change the file's ctime; returns None if that cannot be known."""
        if self._cache_path is None:
            return None
        age_ns = time.time_ns() - os.fstat(file.fileno()).st_ctime_ns
        # Waits at most once, because the file's server may have another clock.
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

    def _execute(self, statement: str, row: tuple[int | str, ...]) -> tuple[object, ...] | None:
        if self._cache_path is None:
            return None
        try:
            with closing(sqlite3.connect(self._cache_path, timeout=10)) as database, database:
                database.execute(_SCHEMA)
                found: tuple[object, ...] | None = database.execute(statement, row).fetchone()
                return found
        except sqlite3.Error as error:
            _log.warning("verified-blob cache %s is of no use: %s", self._cache_path, error)
            return None


def _reading(digest: str) -> AbstractContextManager[None]:
    return reading(lambda detail: BlobNotFound(digest, f"there: {detail}"))
