"""The benchmark's C++ programs: that they compile, and measure what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kernels.linear import ELEMENTS, Candidate, Sizes, compile_driver
from bench.limits import UNITS, Limits
from targets.cpu import X86_64

pytestmark = pytest.mark.toolchain


def test_limits_of_this_host(tmp_path: Path) -> None:
    limits = Limits(tmp_path)
    measured = limits.measure(1, seconds=0.01)
    assert {"read", "float32"} <= set(measured) <= set(UNITS)
    for limit in measured.values():
        assert 1e9 < limit.thread_rate < 1e13
        assert limit.rate < 1.2 * limit.thread_rate, "a thread computes no longer than the clock runs"


def test_kernels_are_timed_with_the_instructions_of_a_level(tmp_path: Path) -> None:
    program = compile_driver(X86_64["x86-64-v3"], tmp_path)
    sizes = Sizes(rows=(1, 7), num_layers=1, seconds=0.01, rounds=1)
    for dtype, element in ELEMENTS.items():
        rates = Candidate("own", dtype, "x86-64-v3", (str(program), element)).measure(sizes)
        assert set(rates) == {1, 7}
        for rows, (operations, size_bytes) in rates.items():
            item_bytes = {"float32": 4, "bfloat16": 2}[dtype]
            assert operations / size_bytes == pytest.approx(2 * rows / item_bytes)
            assert 1e8 < operations < 1e13
