"""What compiles count for metrics."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from compiler_svc.records import Stage
from edge.histogram import Histogram
from edge.spans import record_span

#: Upper bounds in seconds.
STAGE_BOUNDS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class CompileStatistics:
    """Counts of all compiles since the process started."""

    def __init__(self) -> None:
        #: Time that compiles spent in each stage.
        self.stages_s: dict[Stage, Histogram] = {
            stage: Histogram(STAGE_BOUNDS_S) for stage in Stage if stage is not Stage.DONE
        }
        #: Compiles that have ended: `succeeded`, `failed`, `cancelled`.
        self.ended: Counter[str] = Counter(succeeded=0, failed=0, cancelled=0)
        #: Looks for a whole bundle and for single executables in the cache: `hit`, `miss`.
        self.bundles: Counter[str] = Counter(hit=0, miss=0)
        self.executables: Counter[str] = Counter(hit=0, miss=0)
        #: Builds that run now.
        self.running_builds = 0


class StageClock:
    """Measures the stages of one compile, which begins in QUEUED, and adds them to its caller's trace."""

    def __init__(self, statistics: CompileStatistics) -> None:
        self._statistics = statistics
        self._stage = Stage.QUEUED
        self._entered_s, self._entered_ns = time.monotonic(), time.time_ns()

    def enter(self, stage: Stage) -> None:
        """Ends the stage that runs, unless `stage` is the same."""
        if stage is self._stage:
            return
        now_s = time.monotonic()
        duration_s = now_s - self._entered_s
        self._statistics.stages_s[self._stage].observe(duration_s)
        self._entered_ns = record_span(self._stage.value, self._entered_ns, duration_s)
        self._stage, self._entered_s = stage, now_s
