"""Watches how much memory the processes of a lowering take: a process that runs out of memory can end in many ways,
rarely with a clear error, so the memory that it took before tells why it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from execution.forkserver.child import ChildProcess
from execution.forkserver.descendants import find_descendants

_INTERVAL_S: Final = 0.1
#: The kernel refuses a request, not the memory in use: a process may end well below its limit.
_NEAR_LIMIT: Final = 0.8
#: Messages of Python, torch, the C++ library and g++.
_REFUSALS: Final = re.compile(
    r"MemoryError|cannot allocate memory|can't allocate memory|out of memory|bad_alloc|virtual memory exhausted",
    re.IGNORECASE,
)


class MemoryWatch:
    """Remembers the largest data memory seen in a process, or in one that descends from it."""

    def __init__(self) -> None:
        self._peak_bytes = 0

    @contextlib.asynccontextmanager
    async def watching(self, process: ChildProcess) -> AsyncIterator[None]:
        """Looks at intervals until the block ends."""
        task = asyncio.create_task(self._watch(process))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def explains_end(self, limit_bytes: int, output: str) -> bool:
        """Whether a process that ended without a result had reached its memory limit."""
        is_near = self._peak_bytes >= _NEAR_LIMIT * limit_bytes
        return is_near or tells_refusal(output)

    async def _watch(self, process: ChildProcess) -> None:
        while True:
            if (pid := process.pid) is not None:
                self._peak_bytes = max(self._peak_bytes, await asyncio.to_thread(_read_data_bytes, pid))
            await asyncio.sleep(_INTERVAL_S)


def tells_refusal(output: str) -> bool:
    """Whether a process says that it was refused memory."""
    return _REFUSALS.search(output) is not None


def _read_data_bytes(pid: int) -> int:
    """The largest data memory of a process and all that descend from it, in bytes, as RLIMIT_DATA counts it."""
    most = 0
    for one in (pid, *find_descendants(pid)):
        # A process that has ended meanwhile takes no more memory.
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{one}/status").read_text()
            found = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
            most = max(most, 1024 * int(found[1]) if found else 0)
    return most
