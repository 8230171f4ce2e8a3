from bench.other_load import Shares
from bench.sharding.report import Run, render


def run(wall_s: float, peak_bytes: int) -> Run:
    return Run(
        wall_s=wall_s,
        cpu_s=wall_s,
        peak_bytes=peak_bytes,
        read_bytes=8e9,
        written_bytes=8e9,
        anonymous_bytes=1,
        mapped_bytes=1,
        shares=Shares(0.0, 0.0),
    )


def goals(wall_s: float, peak_bytes: int) -> list[str]:
    """The goals' lines, if the plain loop takes 6 s, a shard has 1 GB, and the largest tensor half of that."""
    killed = Run(wall_s=1, anonymous_bytes=1, mapped_bytes=1, shares=Shares(0.0, 0.0))
    runs = {"plain": run(6, 1), "shards": run(wall_s, peak_bytes), "killed": killed}
    page = render(size_bytes=8e9, largest_bytes=500_000_000, num_ranks=8, num_finished=4, runs=runs)
    return page.splitlines()[-2:]


def test_goals_are_judged() -> None:
    rate, memory = goals(9.9, 1_999_000_000)
    assert "0.61 on the clock" in rate
    assert "2000 MB | 1999 MB" in memory
    assert [line.endswith("| met |") for line in (rate, memory)] == [True, True]
    assert all(line.endswith("| **missed** |") for line in goals(10.1, 2_001_000_000))
