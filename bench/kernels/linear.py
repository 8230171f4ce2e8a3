"""Measures `kiln::linear`'s kernel and torch's linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.kernels.candidates import list_candidates, take_turns
from bench.kernels.rates import Rate
from targets.cpu import X86_64


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

    @property
    def words(self) -> tuple[str, ...]:
        """What the programs are called with."""
        return (f"{self.seconds:g}", str(self.num_layers), *map(str, self.rows))


FULL: Final = Sizes(rows=(1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512), num_layers=8, seconds=0.25, rounds=3)
QUICK: Final = Sizes(rows=(1, 16), num_layers=2, seconds=0.02, rounds=1)


def measure_linear(directory: Path, sizes: Sizes) -> list[Rate]:
    """Measures all kernels in turns.

    Args:
        directory: Takes the programs.
        sizes: What is measured.
    """
    candidates = list(list_candidates("linear", "bench.kernels.library", X86_64.list_supported(), directory))
    return [
        Rate(
            kernel=candidate.kernel,
            dtype=candidate.dtype,
            isa=candidate.isa,
            rows=int(rows),
            gflops=speed.gflops,
            gigabytes=speed.gigabytes,
            spread=speed.spread,
        )
        for candidate, speeds in take_turns(candidates, sizes.words, sizes.rounds)
        for rows, speed in speeds.items()
    ]
