"""The table that says which kernel multiplies which rows, against what was measured."""

from __future__ import annotations

import torch

from bench.kernels.rates import choose_fastest, read_rates
from compiler_svc.lower.linear import ATENS_LEAD, MAX_ROWS
from targets.cpu import X86_64
from tests.repository import ROOT

RATES = read_rates(ROOT / "bench" / "kernels" / "linear.json")


def test_every_kernel_was_measured_with_every_instruction_set() -> None:
    measured = {(getattr(torch, rate.dtype), rate.isa, rate.kernel) for rate in RATES}
    assert measured == {
        (dtype, isa, kernel) for dtype in MAX_ROWS for isa in X86_64.names for kernel in ("own", "library")
    }
    assert all([*served] == [*X86_64.names] for served in MAX_ROWS.values())


def test_the_faster_kernel_serves() -> None:
    fastest = choose_fastest(RATES, tolerance=ATENS_LEAD)
    served = {
        (dtype, isa, rows): "own" if rows <= MAX_ROWS[getattr(torch, dtype)][isa] else "library"
        for dtype, isa, rows in fastest
    }
    assert served == fastest
