"""What else the machine does while a run measures: other processes, and the hypervisor's other machines."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

#: Shares of the machine's processors above which figures are not those of an idle machine.
MAX_OTHERS: Final = 0.03
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time of all processors.

    `others` is of the kernel and of processes that the run did not start; `stolen` went to other virtual machines.
    """

    others: float
    stolen: float


class OtherLoad:
    """Compares what the machine's processors did with what this process and its descendants did."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._mark()

    def measure(self) -> Shares:
        """Returns the shares since the last call, or since the beginning."""
        start, self._start = self._start, self._mark()
        (at, busy, stolen, own), (now, busy_now, stolen_now, own_now) = start, self._start
        available = (now - at) * (os.cpu_count() or 1)
        others = max(0.0, (busy_now - busy) - (own_now - own))
        return Shares(others / available, (stolen_now - stolen) / available)

    def _mark(self) -> tuple[float, float, float, float]:
        user, nice, system, _idle, _wait, interrupts, soft_interrupts, stolen = map(
            int, self._stat.read_text().split("\n", 1)[0].split()[1:9]
        )
        busy = user + nice + system + interrupts + soft_interrupts
        return time.monotonic(), busy / _TICKS, stolen / _TICKS, _measure_own()


def _measure_own() -> float:
    """Processor seconds of this process, its descendants, and those of them that have ended and were waited for."""
    process = psutil.Process()
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
