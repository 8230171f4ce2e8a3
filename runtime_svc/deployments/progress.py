"""The progress of a load, for any number of watchers."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass


class LoadStage(enum.Enum):
    """Stages of loads; the API explains each."""

    RESOLVE = enum.auto()
    FETCH = enum.auto()
    VERIFY = enum.auto()
    MAP = enum.auto()
    WARMUP = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of one stage, in bytes; stages that count no bytes have 0 of 0."""

    stage: LoadStage
    done_bytes: int = 0
    total_bytes: int = 0


class ProgressFeed:
    """The stages of one load. A watcher sees every stage, but not every count of bytes within a stage."""

    def __init__(self) -> None:
        self._stages: list[LoadProgress] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    def report(self, stage: LoadStage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Begins a stage, or updates its counts if it is the newest one."""
        progress = LoadProgress(stage, done_bytes, total_bytes)
        if self._stages and self._stages[-1].stage is stage:
            self._stages[-1] = progress
        else:
            self._stages.append(progress)
        self._notify()

    def close(self) -> None:
        """Ends the feed; the load has succeeded or failed."""
        self._is_closed = True
        self._notify()

    async def watch(self) -> AsyncIterator[LoadProgress]:
        """Yields every stage from the first on, until the load ends."""
        index, seen = 0, None
        while True:
            changed = self._changed
            if index < len(self._stages) and self._stages[index] != seen:
                seen = self._stages[index]
                yield seen
            elif index + 1 < len(self._stages):
                index += 1
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _notify(self) -> None:
        # Each change has an event of its own, so that no watcher waits for an event that was set and cleared.
        self._changed.set()
        self._changed = asyncio.Event()
