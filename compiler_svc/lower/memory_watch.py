"""How much memory the processes of a lowering take.

A process that the kernel refuses memory ends in many ways, of which a named error is the rarest: so what it took before
says why it ended.
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
#: A process is refused what it asks for, not what it has: it may end well below its limit.
_NEAR_LIMIT: Final = 0.8
#: What Python, torch, the C++ library and g++ write.
_REFUSALS: Final = re.compile(
    r"MemoryError|cannot allocate memory|can't allocate memory|out of memory|bad_alloc|virtual memory exhausted",
    re.IGNORECASE,
)


class MemoryWatch:
    """Remembers the most data memory that any process of a group was seen to have."""

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self._peak_bytes = 0

    @contextlib.asynccontextmanager
    async def watching(self, process_group: Callable[[], int | None]) -> AsyncIterator[None]:
        """Looks now and then inside the block.

        Args:
            process_group: Gives the group's id; None until there is one.
        """
        task = asyncio.create_task(self._watch(process_group))
        try:
            yield
        finally:
            task.cancel()

    def explains_end(self, limit_bytes: int, log: Path) -> bool:
        """Whether a process that ended without a result had met its limit."""
        is_near = self._peak_bytes >= _NEAR_LIMIT * limit_bytes
        return is_near or _REFUSALS.search(log.read_text(errors="replace")) is not None

    async def _watch(self, find_group: Callable[[], int | None]) -> None:
        while True:
            if (group := find_group()) is not None:
                self._peak_bytes = max(self._peak_bytes, await asyncio.to_thread(_read_data_bytes, group))
            await asyncio.sleep(_INTERVAL_S)


def _read_data_bytes(process_group: int) -> int:
    """The most data memory of any process of a group, as RLIMIT_DATA counts it."""
    most = 0
    for process in Path("/proc").glob("[0-9]*"):
        # A process that ends meanwhile has nothing more to say.
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == process_group:
                found = re.search(r"^VmData:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE)
                most = max(most, 1024 * int(found[1]) if found else 0)
    return most
