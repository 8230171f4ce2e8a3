import time

from compiler_svc.builds.progress import ProgressReport
from compiler_svc.records import BuildNews, BuildPart, Progress, Stage


def make_report() -> tuple[ProgressReport, list[Progress], list[BuildPart]]:
    """A report, the progress that it passes on, and the parts."""
    written: list[Progress] = []
    parts: list[BuildPart] = []

    def write(news: BuildNews) -> None:
        written.extend(filter(None, [news.progress]))
        parts.extend(filter(None, [news.part]))

    return ProgressReport(write), written, parts


def test_counts_go_on_from_stage_to_stage() -> None:
    report, written, _ = make_report()
    report.enter(Stage.TRACE, "exporting")
    report.update(executables_total=2)
    report.enter(Stage.LOWER, "compiling")
    report.add_executable("a is in the cache", cached=True)
    report.add_executable("b is compiled", cached=False, eta_s=3.0)
    report.enter(Stage.SHARD, "sharding")
    last = written[-1]
    assert (last.executables_done, last.executables_cached, last.executables_total) == (2, 1, 2)
    assert (last.stage, last.message, last.eta_s) == (Stage.SHARD, "sharding", None)
    assert written[-2].eta_s == 3.0
    report.enter(Stage.LOWER, "compiling", eta_s=20.0)
    assert written[-1].eta_s == 20.0


def test_bytes_are_passed_on_now_and_then_and_with_the_next_stage() -> None:
    report, written, _ = make_report()
    report.enter(Stage.SHARD, "sharding")
    for _ in range(10_000):
        report.add_sharded_bytes(1)
    assert len(written) < 100
    report.enter(Stage.VERIFY, "comparing")
    assert written[-1].sharded_bytes == 10_000


def test_a_part_is_passed_on_when_it_is_over() -> None:
    report, written, parts = make_report()
    before_ns = time.time_ns()
    with report.measuring("export a"):
        assert parts == []
    report.add_part("lower a", 2.5)
    assert [part.name for part in parts] == ["export a", "lower a"]
    assert parts[0].start_ns >= before_ns
    assert 0 <= parts[0].duration_s < 1
    assert abs(parts[1].start_ns + 2_500_000_000 - time.time_ns()) < 1_000_000_000, "it ends when it is added"
    assert written == [], "no client waits for it"
