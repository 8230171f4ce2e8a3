"""`python -m bench.kernels`: measures the kernels in turns and writes the page; see the package."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.kernels.linear import FULL, QUICK, measure_linear
from bench.kernels.rates import Rate, write_rates
from bench.machine import describe_machine
from bench.tables import render_table

HERE: Final = Path(__file__).parent


def main() -> None:
    """Measures, prints, and writes the rates and the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small measurements: whether it runs, not how fast")
    parser.add_argument("--output", type=Path, default=HERE, help="directory of the page and of the rates")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rates = measure_linear(Path(directory), QUICK if options.quick else FULL)
    machine = describe_machine()
    write_rates(options.output / "linear.json", rates, machine)
    text = render(rates, machine)
    (options.output / "RESULTS.md").write_text(text)
    print(text)


def render(rates: Sequence[Rate], machine: str) -> str:
    """Renders the page in Markdown: one table for each dtype, with our kernel beside the library for each level."""
    isas = list(dict.fromkeys(rate.isa for rate in rates))
    by_key = {(rate.dtype, rate.rows, rate.isa, rate.kernel): rate for rate in rates}
    sections = [
        "# Kernels",
        (
            "Written by `python -m bench.kernels`. GFLOP/s of a thread by its processor time (GB/s of weights), over\n"
            "layers with 768 and 3072 inputs whose weights exceed the caches: `kiln::linear`, then what torch calls\n"
            "within the same instruction set. Medians of rounds in which all took turns; `linear.json` has the spread."
        ),
        f"Machine: {machine}.",
    ]
    for dtype in dict.fromkeys(rate.dtype for rate in rates):
        rows = [
            (str(count), *(_cell(by_key, (dtype, count, isa)) for isa in isas))
            for count in dict.fromkeys(rate.rows for rate in rates)
        ]
        sections.append(f"## {dtype}\n\n" + render_table(("rows", *isas), rows))
    return "\n\n".join(sections) + "\n"


def _cell(rates: dict[tuple[str, int, str, str], Rate], key: tuple[str, int, str]) -> str:
    own, library = rates[*key, "own"], rates[*key, "library"]
    return f"{own.gflops:.1f} ({own.gigabytes:.1f}); {library.gflops:.1f}"


if __name__ == "__main__":
    main()
