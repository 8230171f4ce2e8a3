"""Measures `kiln::linear`'s kernel and torch's linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from bench.kernels.candidates import DENSE, Pair, list_candidates, take_turns
from bench.kernels.rates import Rate
from bundle.abi.formats import FORMATS
from targets.cpu import X86_64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one run measures.

    Each of the `num_layers` of the model has 7.1 M parameters. `seconds` are processor time of one measurement.
    """

    pairs: tuple[Pair, ...]
    rows: tuple[int, ...]
    num_layers: int
    seconds: float
    rounds: int

    @property
    def words(self) -> tuple[str, ...]:
        """What the programs are called with."""
        return (f"{self.seconds:g}", str(self.num_layers), *map(str, self.rows))


_ACTIVATIONS: Final = tuple(dtype for dtype, _ in DENSE)
_SCALED: Final = tuple(product(_ACTIVATIONS, dict.fromkeys(row.item for row in FORMATS.values() if not row.group)))
_GROUPED: Final = tuple(product(_ACTIVATIONS, dict.fromkeys(row.item for row in FORMATS.values() if row.group)))
QUANTIZED: Final = (*_SCALED, *_GROUPED)
FULL: Final = (
    Sizes(pairs=DENSE, rows=(1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512), num_layers=8, seconds=0.25, rounds=3),
    Sizes(pairs=_SCALED, rows=(1, 4, 16, 64, 512), num_layers=16, seconds=0.15, rounds=3),
    # With other activations than bfloat16, torch takes seconds for each product of more rows.
    Sizes(pairs=_GROUPED, rows=(1, 4, 16, 64), num_layers=16, seconds=0.15, rounds=2),
)
QUICK: Final = (Sizes(pairs=(*DENSE, *QUANTIZED), rows=(1, 16), num_layers=2, seconds=0.02, rounds=1),)


def measure_linear(directory: Path, sizes: Sizes) -> list[Rate]:
    """Measures all kernels in turns."""
    isas = X86_64.list_supported()
    candidates = list(list_candidates("linear", "bench.kernels.library", isas, sizes.pairs, directory))
    return [
        Rate(
            kernel=candidate.kernel,
            dtype=candidate.pair[0],
            items=candidate.pair[1],
            isa=candidate.isa,
            rows=int(rows),
            gflops=speed.gflops,
            gigabytes=speed.gigabytes,
            spread=speed.spread,
        )
        for candidate, speeds in take_turns(candidates, sizes.words, sizes.rounds)
        for rows, speed in speeds.items()
    ]
