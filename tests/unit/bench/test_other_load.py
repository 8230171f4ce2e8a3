"""What other processes take of the machine, from what the kernel counts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench.other_load import OtherLoad

TICKS = os.sysconf("SC_CLK_TCK")


def write_stat(path: Path, *, busy_s: float, stolen_s: float) -> None:
    path.write_text(f"cpu  {round(busy_s * TICKS)} 0 0 500 0 0 0 {round(stolen_s * TICKS)} 0 0\ncpu0 1 2 3\n")


def test_own_time_is_not_that_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 110.0, 120.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    own = iter((3.0, 8.0, 12.0))
    monkeypatch.setattr("bench.other_load._measure_own", lambda: next(own))
    stat = tmp_path / "stat"
    write_stat(stat, busy_s=50, stolen_s=1)
    load = OtherLoad(stat)
    write_stat(stat, busy_s=57, stolen_s=3)
    shares = load.measure()
    assert (shares.others, shares.stolen) == (pytest.approx(0.1), pytest.approx(0.1))
    write_stat(stat, busy_s=61, stolen_s=3)
    assert load.measure().others == 0.0, "all of it was our own"


def test_the_kernel_of_this_host_is_understood() -> None:
    load = OtherLoad()
    time.sleep(0.02)
    assert 0 <= load.measure().others < 1.5
