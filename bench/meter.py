"""Measures streams that run at the same time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Mark:
    """Totals at one moment: clock, tokens of all streams, processor time of the watched processes."""

    at: float
    tokens: int
    cpu_s: Mapping[str, float]


class StreamMeter:
    """Counts the tokens of one stream, from the moment when it is asked for."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last = time.perf_counter()
        self._had = 0

    def count(self, new: int) -> None:
        """Counts the `new` tokens of a message that has just come; one without tokens does not count."""
        if new == 0:
            return
        now = time.perf_counter()
        (self._meter.gaps if self._had else self._meter.firsts).append(now - self._last)
        self._last = now
        self._meter.add(self._had, new)
        self._had += new


class Meter:
    """Counts tokens from the moment when every stream has one until the moment when one stream has all.

    `firsts` are seconds from a stream's request to its first token, `gaps` those between two messages with tokens.
    """

    def __init__(self, streams: int, tokens: int, processes: Mapping[str, int]) -> None:
        """Measures streams of `tokens` tokens each, and the time of processes, whose ids it takes by a name."""
        self.streams = streams
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self._waiting = streams
        self._tokens = tokens
        self._processes = processes
        self._total = 0
        self._start: _Mark | None = None
        self._end: _Mark | None = None

    def open_stream(self) -> StreamMeter:
        """Begins to measure one stream, whose request is sent now."""
        return StreamMeter(self)

    def add(self, before: int, new: int) -> None:
        """Adds `new` tokens of a stream that already had `before`."""
        self._total += new
        if before == 0:
            self._waiting -= 1
            if self._waiting == 0:
                self._start = self._mark()
        if before + new == self._tokens and self._end is None:
            self._end = self._mark()

    def result(self) -> dict[str, Any]:
        """`step_s`: seconds per step; `NAME_cpu_s`: processor seconds of each process per token; `firsts`; `gaps`."""
        start, end = self._start, self._end
        if start is None or end is None or end.tokens - start.tokens < self.streams:
            raise ValueError(f"{self.streams} streams of {self._tokens} tokens did not run at the same time")
        counted = end.tokens - start.tokens
        times = {f"{name}_cpu_s": (end.cpu_s[name] - start.cpu_s[name]) / counted for name in self._processes}
        step_s = (end.at - start.at) / counted * self.streams
        return {"step_s": step_s, "firsts": self.firsts, "gaps": self.gaps, **times}

    def _mark(self) -> _Mark:
        times = {name: cpu_time_s(process) for name, process in self._processes.items()}
        return _Mark(time.perf_counter(), self._total, times)


def cpu_time_s(process: int) -> float:
    """Processor time of a process's threads in seconds, exact to the nanosecond; `ps` counts hundredths of seconds."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
