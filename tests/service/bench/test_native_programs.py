"""The benchmark's C++ programs: that they compile, and measure what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench.kernels.attend import Shape, Steps
from bench.kernels.candidates import DENSE, Candidate, Pair, Speed, compile_driver
from bench.kernels.linear import Sizes
from bench.limits import UNITS, Limits
from targets.cpu import X86_64

pytestmark = pytest.mark.toolchain

QUANTIZED: tuple[Pair, ...] = (("bfloat16", "int8"), ("float16", "float8_e5m2"))


def measure(name: str, library: str, pair: Pair, words: tuple[str, ...], directory: Path) -> list[dict[str, Speed]]:
    """What our kernel and the library reached."""
    program = compile_driver(name, X86_64["x86-64-v3"], pair, directory)
    commands = {"own": (str(program),), "library": (sys.executable, "-m", library, *pair)}
    return [Candidate(kernel, pair, "x86-64-v3", command).measure(words) for kernel, command in commands.items()]


def item_bytes(pair: Pair) -> int:
    return getattr(torch, pair[1]).itemsize


@pytest.mark.slow
def test_limits_of_this_host(tmp_path: Path) -> None:
    limits = Limits(tmp_path)
    measured = limits.measure(1, seconds=0.01)
    assert {"read", "float32"} <= set(measured) <= set(UNITS)
    for limit in measured.values():
        assert 1e9 < limit.thread_rate < 1e13
        assert limit.rate < 1.2 * limit.thread_rate, "a thread computes no longer than the clock runs"


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*DENSE, *QUANTIZED], ids="-".join)
def test_linear_layers_are_timed_beside_the_library(pair: Pair, tmp_path: Path) -> None:
    sizes = Sizes(pairs=(pair,), rows=(1, 7), num_layers=1, seconds=0.01, rounds=1)
    for speeds in measure("linear", "bench.kernels.library", pair, sizes.words, tmp_path):
        assert list(speeds) == ["1", "7"]
        for rows, speed in speeds.items():
            assert speed.operations / speed.size_bytes == pytest.approx(2 * int(rows) / item_bytes(pair))
            assert 1e8 < speed.operations < 1e13


@pytest.mark.slow
@pytest.mark.parametrize("pair", DENSE, ids="-".join)
def test_attention_is_timed_beside_the_library(pair: Pair, tmp_path: Path) -> None:
    decode, prompt = Shape(2, 1, 32, group=4), Shape(1, 20, 20, group=1)
    steps = Steps(shapes=(decode, prompt), seconds=0.01, rounds=1)
    for speeds in measure("attend", "bench.kernels.sdpa", pair, steps.words, tmp_path):
        # Each number of a key meets four queries, by a multiplication and an addition, as each of a value does.
        speed = speeds[decode.word]
        assert speed.operations / speed.size_bytes == pytest.approx(2 * 4 / item_bytes(pair))
        # A token of a prompt sees half of it on average.
        speed = speeds[prompt.word]
        assert speed.operations / speed.size_bytes == pytest.approx(21 / item_bytes(pair))
