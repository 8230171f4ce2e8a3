"""What this machine's arithmetic units and memory do at most, measured by loops of their own instructions."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from targets.cpu import GXX

_SOURCE: Final = Path(__file__).with_name("limits.cpp")


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the processor. `title` says what its loop does; rates are in billions of `rate` a second."""

    title: str
    rate: str


#: By the name that the program prints.
UNITS: Final = {
    "read": Unit("reading 1 GiB, anonymous memory in huge pages", "GB/s"),
    "float32": Unit("f32, fused multiplications and additions", "GFLOP/s"),
    "bfloat16": Unit("bf16 pairs into f32 (`dpbf16`)", "GFLOP/s"),
    "bfloat16_tiles": Unit("bf16 tiles into f32 (`tdpbf16ps`)", "GFLOP/s"),
    "int8": Unit("int8 by four into int32 (`dpbusd`)", "GFLOP/s"),
}
#: By dtype, the units that can multiply it. To make bfloat16 wider first is faster on some processors.
MULTIPLIERS: Final = {
    "float32": ("float32",),
    "float16": ("float32",),
    "bfloat16": ("float32", "bfloat16", "bfloat16_tiles"),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """Operations or bytes a second of a unit: of all threads by the clock, and of one by its processor time."""

    rate: float
    thread_rate: float


class Limits:
    """The compiled loops."""

    def __init__(self, directory: Path) -> None:
        """Compiles them for this host, into a directory."""
        self._program = directory / "limits"
        options = ("-O3", "-march=native", "-std=c++20", "-pthread")
        subprocess.run([str(GXX.find()), *options, str(_SOURCE), "-o", str(self._program)], check=True)

    def measure(self, num_threads: int, *, seconds: float = 0.2) -> dict[str, Limit]:
        """Runs each loop on several threads at once; returns the limits of the units that the processor has."""
        words = [str(self._program), str(num_threads), f"{seconds:g}"]
        lines = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        return {name: Limit(float(rate), float(thread_rate)) for name, rate, thread_rate in map(str.split, lines)}
