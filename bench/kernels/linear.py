"""Measures `kiln::linear`'s kernel and torch's linear layers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.kernels.rates import Rate
from bench.worker import ROOT, median
from targets.cpu import GXX, X86_64
from targets.isa import IsaLevel

KERNEL: Final = ROOT / "compiler_svc/lower/kernels/linear.cpp"
_DRIVER: Final = Path(__file__).with_name("linear.cpp")
#: Those of Inductor's kernels, with which lowering compiles the object, as far as they change code.
_OPTIONS: Final = (
    *("-O3", "-std=c++20", "-fopenmp", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=off"),
    *("-fexcess-precision=fast", "-fno-tree-loop-vectorize", "-fno-omit-frame-pointer", "-Wno-ignored-attributes"),
)
#: Name of the kernel's element type by dtype.
ELEMENTS: Final = {"float32": "float", "bfloat16": "uint16_t"}
#: What keeps torch's libraries within an instruction set: oneDNN's name for it, and torch's own.
LIBRARY_ISAS: Final = {
    "x86-64-v3": ("AVX2", "avx2"),
    "x86-64-v4": ("AVX512_CORE", "avx512"),
    "x86-64-v4-vnni": ("AVX512_CORE_VNNI", "avx512"),
    "x86-64-v4-bf16": ("AVX512_CORE_BF16", "avx512"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one run measures.

    Attributes:
        rows: Numbers of rows.
        num_layers: Layers of the model that the rows are multiplied with; 7.1 M parameters each.
        seconds: Processor time of one measurement.
        rounds: How often each is measured.
    """

    rows: tuple[int, ...]
    num_layers: int
    seconds: float
    rounds: int


FULL: Final = Sizes(rows=(1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512), num_layers=8, seconds=0.25, rounds=3)
QUICK: Final = Sizes(rows=(1, 16), num_layers=2, seconds=0.02, rounds=1)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel in a program that times it: `program ELEMENT|DTYPE SECONDS LAYERS ROWS...`."""

    kernel: str
    dtype: str
    isa: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def measure(self, sizes: Sizes) -> dict[int, tuple[float, float]]:
        """Operations and bytes of weights a second, by rows.

        Raises:
            CalledProcessError: The program fails.
        """
        words = [*self.command, f"{sizes.seconds:g}", str(sizes.num_layers), *map(str, sizes.rows)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(self.environment)
        result = subprocess.run(words, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        rates = {}
        for line in result.stdout.splitlines():
            rows, seconds, operations, size_bytes = map(float, line.split())
            rates[int(rows)] = (operations / seconds, size_bytes / seconds)
        return rates


def compile_driver(level: IsaLevel, directory: Path) -> Path:
    """Compiles the kernel and what times it, for one instruction set; returns the program.

    Raises:
        CalledProcessError: The source does not compile.
    """
    program = directory / f"linear-{level.name}"
    words = [str(GXX.find()), *_OPTIONS, *level.compiler_options, f'-DKERNEL="{KERNEL}"', str(_DRIVER)]
    subprocess.run([*words, "-o", str(program)], check=True)
    return program


def list_candidates(directory: Path, levels: Sequence[IsaLevel]) -> Iterator[Candidate]:
    """Compiles the kernel for each level, and names torch's linear layers beside it."""
    for level in levels:
        program = compile_driver(level, directory)
        one_dnn, torch_capability = LIBRARY_ISAS[level.name]
        limits = (("ONEDNN_MAX_CPU_ISA", one_dnn), ("ATEN_CPU_CAPABILITY", torch_capability))
        for dtype, element in ELEMENTS.items():
            yield Candidate("own", dtype, level.name, (str(program), element))
            library = (sys.executable, "-m", "bench.kernels.library", dtype)
            yield Candidate("library", dtype, level.name, library, limits)


def measure_linear(directory: Path, sizes: Sizes) -> list[Rate]:
    """Measures all kernels in turns.

    Args:
        directory: Takes the programs.
        sizes: What is measured.
    """
    levels = [X86_64[name] for name in X86_64.list_supported()]
    candidates = list(list_candidates(directory, levels))
    rounds = [[one.measure(sizes) for one in candidates] for _ in range(sizes.rounds)]
    rates = []
    for candidate, *measured in zip(candidates, *rounds, strict=True):
        for rows in sizes.rows:
            operations = [by_rows[rows][0] for by_rows in measured]
            typical = median(operations)
            rates.append(
                Rate(
                    kernel=candidate.kernel,
                    dtype=candidate.dtype,
                    isa=candidate.isa,
                    rows=rows,
                    gflops=round(typical / 1e9, 1),
                    gigabytes=round(median([by_rows[rows][1] for by_rows in measured]) / 1e9, 2),
                    spread=round((max(operations) - min(operations)) / typical, 3),
                )
            )
    return rates
