"""The progress of a running build, and its parts for a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from compiler_svc.records import BuildNews, BuildPart, Progress, Stage

#: Counts change faster than clients read.
_SHORTEST_INTERVAL_S: Final = 0.1


class ProgressReport:
    """Keeps the newest progress and passes it on at intervals."""

    def __init__(self, write: Callable[[BuildNews], None]) -> None:
        self._write = write
        self._progress = Progress(stage=Stage.TRACE)
        self._written_at_s = 0.0
        self._entered_at_s = time.monotonic()
        self._durations_s: dict[Stage, float] = {}

    @property
    def stage(self) -> Stage:
        """The stage that the build is in."""
        return self._progress.stage

    def enter(self, stage: Stage, message: str, *, eta_s: float | None = None) -> None:
        """Begins a stage, with an estimate of its seconds if there is one. Keeps the counts of earlier stages."""
        self._durations_s = self.measure_stages()
        self._entered_at_s = time.monotonic()
        self._progress = msgspec.structs.replace(self._progress, stage=stage, message=message, eta_s=eta_s)
        self._pass_on()

    def measure_stages(self) -> dict[Stage, float]:
        """Seconds that each stage has taken so far."""
        elapsed_s = time.monotonic() - self._entered_at_s
        stage = self._progress.stage
        return self._durations_s | {stage: self._durations_s.get(stage, 0.0) + elapsed_s}

    def update(self, **changes: Any) -> None:
        """Changes fields of the progress."""
        self._progress = msgspec.structs.replace(self._progress, **changes)
        if time.monotonic() - self._written_at_s >= _SHORTEST_INTERVAL_S:
            self._pass_on()

    def add_sharded_bytes(self, size_bytes: int) -> None:
        """Counts bytes of weights."""
        self.update(sharded_bytes=self._progress.sharded_bytes + size_bytes)

    def add_executable(self, message: str, *, cached: bool, eta_s: float | None = None) -> None:
        """Counts a finished executable."""
        self._progress = msgspec.structs.replace(
            self._progress,
            executables_done=self._progress.executables_done + 1,
            executables_cached=self._progress.executables_cached + cached,
            message=message,
            eta_s=eta_s,
        )
        self._pass_on()

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Adds what the block does to the trace, once it is over."""
        start_s = time.perf_counter()
        yield
        self.add_part(name, time.perf_counter() - start_s)

    def add_part(self, name: str, duration_s: float) -> None:
        """Adds a part of the build that ends now, and took `duration_s` seconds, to the trace."""
        start_ns = time.time_ns() - round(duration_s * 1e9)
        self._write(BuildNews(part=BuildPart(name=name, start_ns=start_ns, duration_s=duration_s)))

    def _pass_on(self) -> None:
        self._written_at_s = time.monotonic()
        self._write(BuildNews(progress=self._progress))
