"""The compiler's metrics."""

from __future__ import annotations

from collections.abc import Iterator

from compiler_svc.compiles.queue import CompileQueue
from compiler_svc.compiles.statistics import CompileStatistics
from edge.metrics import MetricRow, Sample


def list_metrics(queue: CompileQueue, statistics: CompileStatistics) -> list[MetricRow]:
    """Returns the metrics of a compiler."""

    def read_stages() -> Iterator[Sample]:
        return (((stage.value,), histogram) for stage, histogram in statistics.stages_s.items())

    return [
        MetricRow("kiln:compile_stage_seconds", "histogram", "Time of compiles in a stage", ("stage",), read_stages),
        MetricRow(
            "kiln:compiles",
            "counter",
            "Compiles that have ended",
            ("outcome",),
            lambda: (((outcome,), count) for outcome, count in statistics.ended.items()),
        ),
        MetricRow(
            "kiln:bundle_cache_lookups",
            "counter",
            "Looks for a whole bundle in the cache",
            ("result",),
            lambda: (((result,), count) for result, count in statistics.bundles.items()),
        ),
        MetricRow(
            "kiln:executable_cache_lookups",
            "counter",
            "Looks of builds for an executable in the cache",
            ("result",),
            lambda: (((result,), count) for result, count in statistics.executables.items()),
        ),
        MetricRow("kiln:builds_running", "gauge", "Builds that run", (), lambda: [((), statistics.running_builds)]),
        MetricRow(
            "kiln:compiles_unfinished", "gauge", "Compiles that run or wait", (), lambda: [((), queue.num_accepted)]
        ),
    ]
