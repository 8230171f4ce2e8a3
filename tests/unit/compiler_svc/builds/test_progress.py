from compiler_svc.builds.progress import ProgressReport
from compiler_svc.records import Progress, Stage


def test_counts_go_on_from_stage_to_stage() -> None:
    written: list[Progress] = []
    report = ProgressReport(written.append)
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
    written: list[Progress] = []
    report = ProgressReport(written.append)
    report.enter(Stage.SHARD, "sharding")
    for _ in range(10_000):
        report.add_sharded_bytes(1)
    assert len(written) < 100
    report.enter(Stage.VERIFY, "comparing")
    assert written[-1].sharded_bytes == 10_000
