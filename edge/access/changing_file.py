"""A file that is read again when it changes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog

from bundle.errors import KilnError

#: A change is noticed by the first call this long after the last look.
CHECK_INTERVAL_S: Final = 1.0
MAX_BYTES: Final = 1 << 20

ContentT = TypeVar("ContentT")

_log = structlog.get_logger("edge")


class ChangingFile(Generic[ContentT]):
    """The content of a file, as it is now.

    If a changed file cannot be read or is invalid, the former content stays, and the log says so.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], ContentT], refuse: Callable[[str, str], KilnError]) -> None:
        """Reads nothing yet; `parse` runs in a thread, on at most 1 MiB, and raises ValueError if that is invalid."""
        self._path = path
        self._parse = parse
        self._refuse = refuse
        self._content: ContentT | None = None
        self._identity: tuple[int, ...] | None = None
        self._next_check_s = 0.0
        self._reading = asyncio.Lock()

    async def read(self) -> ContentT:
        """Returns the content; looks whether the file has changed if the last look was a second ago."""
        now_s = time.monotonic()
        if self._content is not None and now_s < self._next_check_s:
            return self._content
        async with self._reading:
            if self._content is None or now_s >= self._next_check_s:
                await self._read_if_changed()
            assert self._content is not None
            return self._content

    async def _read_if_changed(self) -> None:
        self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
        try:
            # A look takes microseconds, less than it would to hand it to a thread.
            identity = _identify(os.stat(self._path))  # noqa: PTH116
            if identity == self._identity:
                return
            self._identity = identity
            self._content, self._identity = await asyncio.to_thread(self._load)
        except (OSError, ValueError) as error:
            detail = error.strerror if isinstance(error, OSError) else str(error)
            refusal = self._refuse(str(self._path), str(detail))
            if self._content is None:
                raise refusal from error
            _log.warning("former content kept", reason=refusal.reason, error=str(refusal))
        else:
            _log.info("file read", path=str(self._path))

    def _load(self) -> tuple[ContentT, tuple[int, ...]]:
        with self._path.open("rb") as file:
            identity = _identify(os.fstat(file.fileno()))
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return self._parse(data), identity


def _identify(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
