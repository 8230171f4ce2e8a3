"""Rates of kernels, as files and as a choice."""

from __future__ import annotations

from pathlib import Path

from bench.kernels.__main__ import render
from bench.kernels.rates import Rate, choose_fastest, read_rates, write_rates


def rate(kernel: str, rows: int, gflops: float) -> Rate:
    return Rate(
        kernel=kernel, dtype="bfloat16", isa="x86-64-v4", rows=rows, gflops=gflops, gigabytes=gflops / rows, spread=0.1
    )


RATES = [rate("own", 1, 30.0), rate("library", 1, 10.0), rate("own", 64, 100.0), rate("library", 64, 104.0)]


def test_files_hold_every_rate(tmp_path: Path) -> None:
    write_rates(tmp_path / "linear.json", RATES, "a machine")
    assert read_rates(tmp_path / "linear.json") == RATES


def test_the_faster_kernel_is_chosen_and_our_own_if_both_are_about_as_fast() -> None:
    assert choose_fastest(RATES) == {("bfloat16", "x86-64-v4", 1): "own", ("bfloat16", "x86-64-v4", 64): "library"}
    assert choose_fastest(RATES, tolerance=0.05)["bfloat16", "x86-64-v4", 64] == "own"


def test_the_page_has_both_beside_each_other() -> None:
    page = render(RATES, "a machine")
    assert "| 64 | 100.0 (1.6); 104.0 |" in page
