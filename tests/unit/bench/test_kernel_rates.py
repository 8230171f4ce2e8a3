"""Rates of kernels, as files and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.kernels.__main__ import render
from bench.kernels.attend import AttentionRate, Shape
from bench.kernels.rates import Rate, read_machine, read_rates, read_records, write_rates, write_records

COMMON: Any = {"isa": "x86-64-v4", "spread": 0.1}


def rate(kernel: str, rows: int, gflops: float) -> Rate:
    return Rate(
        kernel=kernel, dtype="bfloat16", items="bfloat16", rows=rows, gflops=gflops, gigabytes=gflops / rows, **COMMON
    )


RATES = [rate("own", 1, 30.0), rate("library", 1, 10.0), rate("own", 64, 100.0), rate("library", 64, 104.0)]


def test_files_hold_every_rate(tmp_path: Path) -> None:
    write_rates(tmp_path / "linear.json", RATES, "a machine")
    assert read_rates(tmp_path / "linear.json") == RATES
    assert read_machine(tmp_path / "linear.json") == "a machine"


def attention(kernel: str, gflops: float) -> AttentionRate:
    shape = Shape(4, 1, 512, group=4)
    return AttentionRate(kernel=kernel, dtype="float32", shape=shape, gflops=gflops, gigabytes=3.0, **COMMON)


ATTENTION = [attention("own", 12.0), attention("library", 5.0)]


def test_files_hold_every_rate_of_attention(tmp_path: Path) -> None:
    write_records(tmp_path / "attend.json", [rate.make_record() for rate in ATTENTION], "a machine")
    assert [AttentionRate.of_record(record) for record in read_records(tmp_path / "attend.json")] == ATTENTION


def test_the_page_has_both_beside_each_other() -> None:
    page = render(RATES, ATTENTION, "a machine", "another machine")
    assert "| 64 | 100.0 (1.6); 104.0 |" in page
    assert "| 4 rows of 512, 4 queries for each key | 12.0 (3.0); 5.0 |" in page
    layers, attention = page.split("## Attention", 1)
    assert "Machine: a machine." in layers
    assert "Machine: another machine." in attention
