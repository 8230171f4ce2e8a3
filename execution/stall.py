"""Notices work that does not end: for how long it has been under way, and for how long its processes have stood still.

A watch looks at regular intervals. So work that ends between two looks, as a step does, costs nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Final

#: Looks in the time after which a process that stands still counts as hung.
LOOKS_PER_TIMEOUT: Final = 10

#: States in /proc/PID/stat of a process that a signal or a debugger has stopped, and of one that waits for a disk.
_STOPPED_STATES: Final = "Tt"
_DISK_STATES: Final = "D"
_LIBC: Final = ctypes.CDLL(None)


class Stall:
    """Looks at one piece of work after another, at equal intervals.

    It counts looks, not seconds. If this process is stopped together with those that it looks at, as `docker pause`
    does, no time passes.
    """

    def __init__(self, interval_s: float, *, idle_share: float = 0.0) -> None:
        """Processes stand still that compute for at most `idle_share` of an interval; 0 allows no computation."""
        self._interval_s = interval_s
        self._idle_s = idle_share * interval_s
        self._work: Hashable = None
        self._cpu_s = 0.0
        self._num_looks = self._num_still = 0

    @property
    def unfinished_s(self) -> float:
        """Seconds for which the work has been seen under way."""
        return self._num_looks * self._interval_s

    @property
    def still_s(self) -> float:
        """Seconds for which its processes have stood still, up to the last look."""
        return self._num_still * self._interval_s

    def look(self, work: Hashable, pids: Sequence[int]) -> None:
        """Looks once. `work` identifies the work under way; None if there is none."""
        cpu_s = sum(map(read_cpu_s, pids))
        if work is None or work != self._work:
            self._work = work
            self._num_looks = self._num_still = 0
        else:
            self._num_looks += 1
            # A process that the kernel keeps until a disk answers is not hung, and no signal would end it.
            is_still = cpu_s - self._cpu_s <= self._idle_s and not any(map(waits_for_disk, pids))
            self._num_still = self._num_still + 1 if is_still else 0
        self._cpu_s = cpu_s


class Watch:
    """Calls a function at equal intervals, from the running event loop, until `stop`."""

    def __init__(self, interval_s: float, look: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._run)

    def stop(self) -> None:
        """Ends the calls. Calling it again is harmless."""
        self._timer.cancel()

    def _run(self) -> None:
        # First, because the call may stop the watch, or raise.
        self._timer = self._loop.call_later(self._interval_s, self._run)
        self._look()


def read_cpu_s(pid: int) -> float:
    """Returns the seconds that all threads of a process have computed; 0 if the process is gone.

    The kernel keeps this clock in nanoseconds; /proc shows hundredths of a second.
    """
    clock = ctypes.c_int()
    if _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        return 0.0
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return 0.0


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    return _read_state(pid) in _STOPPED_STATES


def waits_for_disk(pid: int) -> bool:
    """Whether a process sleeps where no signal wakes it: until a disk, or a file system, has answered."""
    return _read_state(pid) in _DISK_STATES


def _read_state(pid: int) -> str:
    """The letter of a process's state; that of a dead one if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    # The name before the state is in parentheses, and may hold some itself.
    return stat.rpartition(")")[2].split()[0]
