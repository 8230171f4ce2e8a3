"""The benchmark's C++ programs: that they compile, and measure what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.kernels.attend import Shape, Steps
from bench.kernels.candidates import ELEMENTS, Candidate, compile_driver
from bench.kernels.linear import Sizes
from bench.limits import UNITS, Limits
from targets.cpu import X86_64

pytestmark = pytest.mark.toolchain

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def test_limits_of_this_host(tmp_path: Path) -> None:
    limits = Limits(tmp_path)
    measured = limits.measure(1, seconds=0.01)
    assert {"read", "float32"} <= set(measured) <= set(UNITS)
    for limit in measured.values():
        assert 1e9 < limit.thread_rate < 1e13
        assert limit.rate < 1.2 * limit.thread_rate, "a thread computes no longer than the clock runs"


@pytest.mark.slow
def test_linear_layers_are_timed_with_the_instructions_of_a_level(tmp_path: Path) -> None:
    program = compile_driver("linear", X86_64["x86-64-v3"], tmp_path)
    sizes = Sizes(rows=(1, 7), num_layers=1, seconds=0.01, rounds=1)
    for dtype, element in ELEMENTS.items():
        speeds = Candidate("own", dtype, "x86-64-v3", (str(program), element)).measure(sizes.words)
        assert list(speeds) == ["1", "7"]
        for rows, speed in speeds.items():
            assert speed.operations / speed.size_bytes == pytest.approx(2 * int(rows) / ITEM_BYTES[dtype])
            assert 1e8 < speed.operations < 1e13


@pytest.mark.slow
def test_attention_is_timed_beside_the_library(tmp_path: Path) -> None:
    decode, prompt = Shape(2, 1, 32, group=4), Shape(1, 20, 20, group=1)
    steps = Steps(shapes=(decode, prompt), seconds=0.01, rounds=1)
    program = compile_driver("attend", X86_64["x86-64-v3"], tmp_path)
    for dtype, element in ELEMENTS.items():
        own = Candidate("own", dtype, "x86-64-v3", (str(program), element))
        library = Candidate("library", dtype, "x86-64-v3", (sys.executable, "-m", "bench.kernels.sdpa", dtype))
        for candidate in (own, library):
            speeds = candidate.measure(steps.words)
            # Each number of a key meets four queries, by a multiplication and an addition, as each of a value does.
            speed = speeds[decode.word]
            assert speed.operations / speed.size_bytes == pytest.approx(2 * 4 / ITEM_BYTES[dtype])
            # A token of a prompt sees half of it on average.
            speed = speeds[prompt.word]
            assert speed.operations / speed.size_bytes == pytest.approx(21 / ITEM_BYTES[dtype])
