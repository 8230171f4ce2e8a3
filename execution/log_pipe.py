"""A process's standard error, read line by line from an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import IO


class LogPipe:
    """Reads a pipe as data comes, and hands its lines on."""

    def __init__(self, pipe: IO[bytes], sink: Callable[[str], None]) -> None:
        """Takes the reading end over."""
        self._pipe = pipe
        self._fd = pipe.fileno()
        self._sink = sink
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Reads what is there, and gives the pipe back. The writer must have ended."""
        while self._read():
            pass
        if self._rest:
            self._hand_on(self._rest)
        self._loop.remove_reader(self._fd)
        self._pipe.close()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._fd)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._hand_on(line)
        return bool(chunk)

    def _hand_on(self, line: bytes) -> None:
        self._sink(line.decode(errors="replace"))
