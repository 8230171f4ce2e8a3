"""Resident memory of the services over time, and its slope."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

INTERVAL_S: Final = 1.0
#: The fit is over means of this many equal parts of the time, so that samples that resemble their neighbours do not
#: make the error look small.
NUM_PARTS: Final = 12
#: Share of the samples, the first ones, in which caches, pools and allocators still fill.
WARM_UP: Final = 1 / 3
#: Growth over the samples that may come from what a run keeps on purpose: histograms, logs' buffers, fragments.
MAX_GROWTH_MB: Final = 8.0


@dataclass(frozen=True)
class Slope:
    """A line through samples of memory.

    Attributes:
        mb_per_hour: Its slope; 1 MB is 10⁶ bytes.
        error: One standard error of the slope.
        hours: Time of the samples.
        last_mb: Mean of the last part.
    """

    mb_per_hour: float
    error: float
    hours: float
    last_mb: float

    @property
    def is_flat(self) -> bool:
        """Whether the growth that is certain (two errors below the slope) is small."""
        return (self.mb_per_hour - 2 * self.error) * self.hours <= MAX_GROWTH_MB


def fit_slope(samples: Sequence[tuple[float, float]]) -> Slope:
    """Fits a line to (seconds, bytes) behind the warm-up.

    Raises:
        ValueError: There are too few samples.
    """
    kept = samples[int(len(samples) * WARM_UP) :]
    if len(kept) < NUM_PARTS:
        raise ValueError(f"{len(samples)} samples are too few for {NUM_PARTS} parts")
    parts = [kept[len(kept) * i // NUM_PARTS : len(kept) * (i + 1) // NUM_PARTS] for i in range(NUM_PARTS)]
    hours = [statistics.fmean(time_s for time_s, _ in part) / 3600 for part in parts]
    sizes = [statistics.fmean(size for _, size in part) / 1e6 for part in parts]
    slope, intercept = statistics.linear_regression(hours, sizes)
    residue = sum((size - slope * hour - intercept) ** 2 for hour, size in zip(hours, sizes, strict=True))
    mean = statistics.fmean(hours)
    spread = sum((hour - mean) ** 2 for hour in hours)
    error = math.sqrt(residue / (NUM_PARTS - 2) / spread)
    return Slope(slope, error, (kept[-1][0] - kept[0][0]) / 3600, sizes[-1])


class MemorySampler:
    """Samples the resident memory of groups of processes."""

    def __init__(self, find: Callable[[], Mapping[str, Sequence[psutil.Process]]]) -> None:
        """Takes what lists the processes of each group now."""
        self._find = find
        self.samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Takes one sample of each group. A group with a process that has just ended is left out."""
        now_s = time.monotonic()
        for group, processes in self._find().items():
            with suppress(psutil.NoSuchProcess):
                self.samples[group].append((now_s, sum(one.memory_info().rss for one in processes)))

    def fit_slopes(self) -> dict[str, Slope]:
        """The slope of each group that has enough samples."""
        slopes = {}
        for group, samples in self.samples.items():
            with suppress(ValueError):
                slopes[group] = fit_slope(samples)
        return slopes

    def last_mb(self, group: str) -> float:
        return self.samples[group][-1][1] / 1e6 if self.samples[group] else 0.0
