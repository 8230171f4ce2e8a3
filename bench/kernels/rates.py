"""Rates of kernels, as measured: one row for each kernel, dtype, instruction set and number of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The median of several rounds in which all kernels took turns, by a thread's processor time.

    Attributes:
        kernel: `own`, or `library`, which is what torch calls.
        dtype: Of weights and activations, such as `float32`.
        isa: Name of the instruction set, as in targets/cpu.py.
        rows: Rows of activations.
        gflops: Billions of additions and multiplications a second.
        gigabytes: Billions of bytes of weights that were read in a second.
        spread: Difference between the best and the worst round, as a share of the median.
    """

    kernel: str
    dtype: str
    isa: str
    rows: int
    gflops: float
    gigabytes: float
    spread: float


def write_rates(path: Path, rates: Iterable[Rate], machine: str) -> None:
    """Writes rates with the machine that they were measured on, a line for each."""
    lines = ",\n".join(f"    {json.dumps(asdict(rate))}" for rate in rates)
    path.write_text(f'{{\n  "machine": {json.dumps(machine)},\n  "rates": [\n{lines}\n  ]\n}}\n')


def read_rates(path: Path) -> list[Rate]:
    """Reads what `write_rates` wrote."""
    return [Rate(**rate) for rate in json.loads(path.read_text())["rates"]]


def choose_fastest(rates: Sequence[Rate], *, tolerance: float = 0.0) -> dict[tuple[str, str, int], str]:
    """Chooses a kernel by (dtype, isa, rows).

    Args:
        rates: What was measured.
        tolerance: `own` serves although `library` is faster by up to this share: own code needs no call of torch.
    """
    chosen: dict[tuple[str, str, int], Rate] = {}
    for rate in rates:
        key = (rate.dtype, rate.isa, rate.rows)
        held = chosen.get(key)
        if held is None or _score(rate, tolerance) > _score(held, tolerance):
            chosen[key] = rate
    return {key: rate.kernel for key, rate in chosen.items()}


def _score(rate: Rate, tolerance: float) -> float:
    return rate.gflops * (1 + tolerance if rate.kernel == "own" else 1)
