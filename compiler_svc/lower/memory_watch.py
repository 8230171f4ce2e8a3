"""Watches how much memory the processes of a lowering take.

A process that runs out of memory can end in many ways, rarely with a clear error. So the memory that it took before
tells why it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

_INTERVAL_S: Final = 0.1
#: The kernel refuses a request, not the memory in use: a process may end well below its limit.
_NEAR_LIMIT: Final = 0.8
#: Messages of Python, torch, the C++ library and g++.
_REFUSALS: Final = re.compile(
    r"MemoryError|cannot allocate memory|can't allocate memory|out of memory|bad_alloc|virtual memory exhausted",
    re.IGNORECASE,
)


class MemoryWatch:
    """Remembers the largest data memory seen in any process of a group."""

    def __init__(self) -> None:
        """Starts without having seen a process."""
        self._peak_bytes = 0

    @contextlib.asynccontextmanager
    async def watching(self, process_group: Callable[[], int | None]) -> AsyncIterator[None]:
        """Looks at intervals until the block ends.

        Args:
            process_group: Returns the group's id; None until the group exists.
        """
        task = asyncio.create_task(self._watch(process_group))
        try:
            yield
        finally:
            task.cancel()

    def explains_end(self, limit_bytes: int, output: str) -> bool:
        """Whether a process that ended without a result had reached its memory limit.

        Args:
            output: What the process and those that it started said.
        """
        is_near = self._peak_bytes >= _NEAR_LIMIT * limit_bytes
        return is_near or tells_refusal(output)

    async def _watch(self, find_group: Callable[[], int | None]) -> None:
        while True:
            if (group := find_group()) is not None:
                self._peak_bytes = max(self._peak_bytes, await asyncio.to_thread(_read_data_bytes, group))
            await asyncio.sleep(_INTERVAL_S)


def tells_refusal(output: str) -> bool:
    """Whether a process says that it was refused memory.

    Args:
        output: What the process and those that it started said.
    """
    return _REFUSALS.search(output) is not None


def _read_data_bytes(process_group: int) -> int:
    """The largest data memory of any process of a group, in bytes, as RLIMIT_DATA counts it."""
    most = 0
    for process in Path("/proc").glob("[0-9]*"):
        # A process that has ended meanwhile takes no more memory.
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == process_group:
                found = re.search(r"^VmData:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE)
                most = max(most, 1024 * int(found[1]) if found else 0)
    return most
