"""How long something took, by the time in which this process ran.

A busy machine can let a process stand still for seconds, which the clock counts and no test can forbid. A thread counts
short sleeps instead: a stretch in which nothing runs is one of them, however long it lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

_TICK_S: Final = 0.01


@dataclass
class RunningTime:
    """Time since the block began; it stands still once the block has ended.

    Attributes:
        num_ticks: Sleeps of 10 ms that a thread of this process has had meanwhile.
    """

    num_ticks: int = 0
    _has_ended: threading.Event = field(default_factory=threading.Event)

    @property
    def s(self) -> float:
        """In seconds: never more than the clock says."""
        return self.num_ticks * _TICK_S

    def _count(self) -> None:
        while not self._has_ended.is_set():
            time.sleep(_TICK_S)
            self.num_ticks += 1


@contextmanager
def running_time() -> Iterator[RunningTime]:
    """Measures a block, whether it computes, awaits or waits for other processes."""
    taken = RunningTime()
    thread = threading.Thread(target=taken._count, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        taken._has_ended.set()
        thread.join()
