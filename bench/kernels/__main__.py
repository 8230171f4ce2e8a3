"""`python -m bench.kernels`: measures the kernels in turns and writes the page; see the package."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.kernels import attend, linear
from bench.kernels.attend import AttentionRate
from bench.kernels.rates import Rate, read_machine, read_rates, read_records, write_rates, write_records
from bench.machine import describe_machine
from bench.tables import render_table

HERE: Final = Path(__file__).parent


def main() -> None:
    """Measures, prints, and writes the rates and the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small measurements: whether it runs, not how fast")
    parser.add_argument("--output", type=Path, default=HERE, help="directory of the page and of the rates")
    parser.add_argument("--only", choices=("linear", "attend"), help="keep the other kernel's rates as they are")
    options = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.only != "attend":
            runs = linear.QUICK if options.quick else linear.FULL
            rates = [rate for sizes in runs for rate in linear.measure_linear(directory, sizes)]
            write_rates(options.output / "linear.json", rates, machine)
        if options.only != "linear":
            steps = attend.measure_attend(directory, attend.QUICK if options.quick else attend.FULL)
            write_records(options.output / "attend.json", [rate.make_record() for rate in steps], machine)
    linear_path, attend_path = options.output / "linear.json", options.output / "attend.json"
    attention = [AttentionRate.of_record(record) for record in read_records(attend_path)]
    text = render(read_rates(linear_path), attention, read_machine(linear_path), read_machine(attend_path))
    (options.output / "RESULTS.md").write_text(text)
    print(text)


def render(rates: Sequence[Rate], attention: Sequence[AttentionRate], machine: str, attention_machine: str) -> str:
    """Renders the page in Markdown: a table for each pair of dtypes, with our kernel beside the library by level."""
    isas = list(dict.fromkeys(rate.isa for rate in rates))
    by_key = {(rate.dtype, rate.items, rate.rows, rate.isa, rate.kernel): rate for rate in rates}
    sections = [
        "# Kernels",
        (
            "Written by `python -m bench.kernels`. GFLOP/s of a thread by its processor time (GB/s of weights), over\n"
            "layers with 768 and 3072 inputs whose weights exceed the caches: `kiln::linear`, then what torch calls\n"
            "within the same instruction set. Medians of rounds in which all took turns; linear.json has the spread.\n"
            "Weights in another dtype are quantized, uint8 in groups of 128; of float8, torch makes floats first."
        ),
        f"Machine: {machine}.",
    ]
    for pair in dict.fromkeys((rate.dtype, rate.items) for rate in rates):
        rows = [
            (str(count), *(_cell(by_key, (*pair, count, isa)) for isa in isas))
            for count in dict.fromkeys(rate.rows for rate in rates if (rate.dtype, rate.items) == pair)
        ]
        title = " with weights in ".join(dict.fromkeys(pair))
        sections.append(f"## {title}\n\n" + render_table(("rows", *isas), rows))
    return "\n\n".join([*sections, *attend.render_attend(attention, attention_machine)]) + "\n"


def _cell(rates: dict[tuple[str, str, int, str, str], Rate], key: tuple[str, str, int, str]) -> str:
    own, library = rates[*key, "own"], rates[*key, "library"]
    return f"{own.gflops:.1f} ({own.gigabytes:.1f}); {library.gflops:.1f}"


if __name__ == "__main__":
    main()
