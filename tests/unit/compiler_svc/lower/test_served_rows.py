"""Which kernel multiplies which rows, against what was measured."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from bench.kernels.linear import QUANTIZED
from bench.kernels.rates import Rate, read_rates
from compiler_svc.lower.linear import ATENS_LEAD, DENSE_DTYPES
from targets.cpu import X86_64
from tests.repository import ROOT

RATES = read_rates(ROOT / "bench" / "kernels" / "linear.json")
DENSE = [(dtype, dtype) for dtype in sorted(str(one).removeprefix("torch.") for one in DENSE_DTYPES)]


def test_every_kernel_was_measured_with_every_instruction_set() -> None:
    measured = {(rate.dtype, rate.items, rate.isa, rate.kernel) for rate in RATES}
    expected = product((*DENSE, *QUANTIZED), X86_64.names, ("own", "library"))
    assert measured == {(*pair, isa, kernel) for pair, isa, kernel in expected}


#: Where both kernels are equal as far as the host that measured them could tell: its rounds differ by more than they.
EQUAL = {("float16", "x86-64-v4-amx")}


def find_lead(own: Rate, library: Rate) -> float:
    is_equal = (own.dtype, own.isa) in EQUAL
    return max(own.spread, library.spread) if is_equal else ATENS_LEAD


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_no_library_is_much_faster(dtype: torch.dtype) -> None:
    """Ours serves even where the library is faster by a little."""
    rates = [rate for rate in RATES if getattr(torch, rate.dtype) is dtype and rate.items == rate.dtype]
    by_case = {(rate.isa, rate.rows, rate.kernel): rate for rate in rates}
    pairs = [(own, by_case[isa, rows, "library"]) for (isa, rows, kernel), own in by_case.items() if kernel == "own"]
    assert [
        (own, library) for own, library in pairs if own.gflops * (1 + find_lead(own, library)) < library.gflops
    ] == []
