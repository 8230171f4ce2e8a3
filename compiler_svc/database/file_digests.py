"""Remembers digests of files until the files change, because checkpoints are large and rarely change."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from bundle.digest import Progress, sha256_file
from compiler_svc.database.engine import Database
from compiler_svc.database.tables import FileDigestRow

# A file that changed this recently may change again within the same tick of its ctime.
_SETTLE_TIME_NS: Final = 1_000_000_000


class FileDigests:
    """Digests of files, remembered by (device, inode, size, ctime)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def digest_file(self, path: Path, progress: Progress | None = None) -> str:
        """Returns the digest of a file; hashes the file only if it is new or changed. Blocks: call it from a thread.
        Calls `progress` with the number of bytes hashed since the previous call; it may raise to stop hashing.
        """
        status = path.stat()
        known = self._database.run_and_wait(_find, status)
        if known is not None:
            return known
        digest = sha256_file(path, progress)
        if _identity(path.stat()) == _identity(status) and time.time_ns() - status.st_ctime_ns > _SETTLE_TIME_NS:
            self._database.run_and_wait(_remember, status, digest)
        return digest


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _find(session: Session, status: os.stat_result) -> str | None:
    row = session.get(FileDigestRow, (status.st_dev, status.st_ino))
    if row is None or (row.device, row.inode, row.size_bytes, row.ctime_ns) != _identity(status):
        return None
    return row.digest


def _remember(session: Session, status: os.stat_result, digest: str) -> None:
    device, inode, size_bytes, ctime_ns = _identity(status)
    session.merge(FileDigestRow(device=device, inode=inode, size_bytes=size_bytes, ctime_ns=ctime_ns, digest=digest))
