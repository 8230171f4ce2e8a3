"""What the services hold: processes, descriptors, memory files and files on disk, counted before and after a run."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from tests.memory_files import list_mapped, name_memory_file

_NUMBER: Final = re.compile(r":\[\d+\]$")
#: How long processes may take to let go of what clients that have left held.
PATIENCE_S: Final = 30.0


@dataclass(frozen=True)
class Census:
    """One count.

    Attributes:
        held: By what is held, such as `runtime: socket` or `process kiln-rank-0`, how many there are.
    """

    held: Counter[str]

    def list_leaks(self, before: Census) -> list[str]:
        """What there is more of than before."""
        more = sorted(what for what, count in self.held.items() if count > before.held[what])
        return [f"{what}, {before.held[what]} before and {self.held[what]} now" for what in more]


def take_census(processes: Mapping[str, Sequence[psutil.Process]], folders: Sequence[Path]) -> Census:
    """Counts what processes, by the names of their groups, and folders hold now."""
    held = Counter[str]()
    for group, members in processes.items():
        for process in members:
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                held[f"process {group} ({_state(process)})"] += 1
                held.update(f"{group}: {kind}" for kind in _descriptors(process.pid))
                held.update(f"{group}: mapped {name}" for name in list_mapped(process.pid))
    for folder in folders:
        held.update(f"file {path}" for path in folder.rglob("*") if path.is_file())
    return Census(held)


async def settle(count: Callable[[], Census], before: Census) -> list[str]:
    """Counts again until nothing is left over, or time is up; returns what is left over then."""
    end_s = time.monotonic() + PATIENCE_S
    while (leaks := count().list_leaks(before)) and time.monotonic() < end_s:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.5)
    return leaks


def _state(process: psutil.Process) -> str:
    return "zombie" if process.status() == psutil.STATUS_ZOMBIE else "alive"


def _descriptors(pid: int) -> Iterator[str]:
    """The kind of each open descriptor: `socket`, `pipe`, the name of a memory file, or a path."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield name_memory_file(_NUMBER.sub("", str(link.readlink())))
