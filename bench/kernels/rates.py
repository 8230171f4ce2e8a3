"""Rates of kernels, as measured: one row for each kernel, dtype, instruction set and number of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The median of several rounds in which all kernels took turns, by a thread's processor time.

    Attributes:
        kernel: `own`, or `library`, which is what torch calls.
        dtype: Of activations, such as `float32`.
        items: Dtype of the weights, or of their items if they are quantized.
        isa: Name of the instruction set, as in targets/cpu.py.
        gflops: Billions of additions and multiplications a second.
        gigabytes: Billions of bytes of weights that were read in a second.
        spread: Difference between the best and the worst round, as a share of the median.
    """

    kernel: str
    dtype: str
    items: str
    isa: str
    rows: int
    gflops: float
    gigabytes: float
    spread: float


def write_rates(path: Path, rates: Iterable[Rate], machine: str) -> None:
    """Writes rates with the machine that they were measured on, a line for each."""
    write_records(path, map(asdict, rates), machine)


def write_records(path: Path, records: Iterable[Mapping[str, object]], machine: str) -> None:
    """Writes rates as `write_rates` does, by their fields."""
    lines = ",\n".join(f"    {json.dumps(record)}" for record in records)
    path.write_text(f'{{\n  "machine": {json.dumps(machine)},\n  "rates": [\n{lines}\n  ]\n}}\n')


def read_rates(path: Path) -> list[Rate]:
    """Reads what `write_rates` wrote."""
    return [Rate(**record) for record in read_records(path)]


def read_machine(path: Path) -> str:
    """Reads on what machine the rates of a file were measured."""
    machine: str = json.loads(path.read_text())["machine"]
    return machine


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_records` wrote."""
    records: list[dict[str, Any]] = json.loads(path.read_text())["rates"]
    return records
