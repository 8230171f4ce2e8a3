"""Programs that time a kernel: our own, compiled for one instruction set, and what torch calls within the same one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import torch

from bench.worker import ROOT, median
from compiler_svc.lower.linear import TYPES
from targets.cpu import GXX, X86_64
from targets.isa import IsaLevel

_HERE: Final = Path(__file__).parent
_KERNELS: Final = ROOT / "compiler_svc/lower/kernels"
#: Those of Inductor's kernels, with which lowering compiles the object, as far as they change code.
_OPTIONS: Final = (
    *("-O3", "-std=c++20", "-fopenmp", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=off"),
    *("-fexcess-precision=fast", "-fno-tree-loop-vectorize", "-fno-omit-frame-pointer", "-Wno-ignored-attributes"),
)
#: Names of two dtypes: of activations and weights, or of queries and the cache.
Pair = tuple[str, str]
#: Those that are measured alike by both kernels.
DENSE: Final[tuple[Pair, ...]] = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"))
#: What keeps torch's libraries within an instruction set: oneDNN's name for it, and torch's own.
LIBRARY_ISAS: Final = {
    "x86-64-v3": ("AVX2", "avx2"),
    "x86-64-v4": ("AVX512_CORE", "avx512"),
    "x86-64-v4-vnni": ("AVX512_CORE_VNNI", "avx512"),
    "x86-64-v4-bf16": ("AVX512_CORE_BF16", "avx512"),
    "x86-64-v4-amx": ("AVX512_CORE_AMX", "avx512"),
}


@dataclass(frozen=True, slots=True)
class Speed:
    """What one case reached: operations and bytes a second, and how far rounds differ as a share of the median."""

    operations: float
    size_bytes: float
    spread: float = 0.0

    @property
    def gflops(self) -> float:
        """Billions of operations a second, as pages and files say them."""
        return round(self.operations / 1e9, 1)

    @property
    def gigabytes(self) -> float:
        """Billions of bytes a second, as pages and files say them."""
        return round(self.size_bytes / 1e9, 2)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel in a program that times it: `program SECONDS WORDS...`, which prints a line for each case: the case's
    word, processor seconds of the thread, operations, bytes."""

    kernel: str
    pair: Pair
    isa: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def measure(self, words: Sequence[str]) -> dict[str, Speed]:
        """Runs the program once; returns what it reached, by the case's word."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(self.environment)
        command = [*self.command, *words]
        result = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        speeds = {}
        for line in result.stdout.splitlines():
            case, *figures = line.split()
            seconds, operations, size_bytes = map(float, figures)
            speeds[case] = Speed(operations / seconds, size_bytes / seconds)
        return speeds


def compile_driver(name: str, level: IsaLevel, pair: Pair, directory: Path) -> Path:
    """Compiles a kernel and what times it (`NAME.cpp` here), for one instruction set; returns the program."""
    program = directory / "-".join((name, level.name, *pair))
    element, item = (TYPES[getattr(torch, dtype)] for dtype in pair)
    defined = (f'-DKERNEL="{_KERNELS / name}.cpp"', f"-DELEMENT={element}", f"-DITEM={item}")
    words = [str(GXX.find()), *_OPTIONS, *level.compiler_options, *defined, str(_HERE / f"{name}.cpp")]
    subprocess.run([*words, "-o", str(program)], check=True)
    return program


def list_candidates(
    name: str, library: str, isas: Sequence[str], pairs: Sequence[Pair], directory: Path
) -> Iterator[Candidate]:
    """Compiles a kernel for each level and pair of dtypes, and names what torch calls beside it."""
    cases = list(product((X86_64[isa] for isa in isas), pairs))
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        programs = compilers.map(lambda case: compile_driver(name, *case, directory), cases)
        for (level, pair), program in zip(cases, programs, strict=True):
            one_dnn, torch_capability = LIBRARY_ISAS[level.name]
            limits = (("ONEDNN_MAX_CPU_ISA", one_dnn), ("ATEN_CPU_CAPABILITY", torch_capability))
            yield Candidate("own", pair, level.name, (str(program),))
            yield Candidate("library", pair, level.name, (sys.executable, "-m", library, *pair), limits)


def take_turns(
    candidates: Sequence[Candidate], words: Sequence[str], rounds: int
) -> Iterator[tuple[Candidate, dict[str, Speed]]]:
    """Measures all candidates in each of several rounds; yields the median of each candidate's rounds, by case."""
    measured = [[candidate.measure(words) for candidate in candidates] for _ in range(rounds)]
    for candidate, *by_round in zip(candidates, *measured, strict=True):
        yield candidate, {case: _summarize([speeds[case] for speeds in by_round]) for case in by_round[0]}


def _summarize(speeds: Sequence[Speed]) -> Speed:
    operations = [speed.operations for speed in speeds]
    typical = median(operations)
    spread = (max(operations) - min(operations)) / typical
    return Speed(typical, median([speed.size_bytes for speed in speeds]), round(spread, 3))
