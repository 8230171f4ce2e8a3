"""`python -m bench.constraints`: steps of constrained rows beside those of others, in many turns, for their goal.

The bundles that `bench.generation` measures one after the other are served side by side here, and idle while another
one is measured. A round measures each case next to the one that it is compared with, in the same deployment, and the
next round goes back, so that a host whose pace changes does not decide.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.checkpoint import write_checkpoint
from bench.generation import CASES, LEGEND, RUNTIMES, plan_workloads
from bench.machine import describe_machine
from bench.measurements import Measurements
from bench.other_load import OtherLoad
from bench.plan import Workload, decode_bundle
from bench.run import MODEL, say
from bench.services import Server, compile_bundle, deployed, measure_streams, running_server, running_services
from bench.tables import Row, count_streams, render_table
from bench.worker import Worker

#: The cases that have a goal, by name, and all that are measured: each behind its reference.
_WITH_GOALS: Final = [name for name, case in CASES.items() if case.goal is not None]
_NAMES: Final = [one for name in _WITH_GOALS for one in (CASES[name].reference, name)]
_NUM_ROUNDS: Final = 40


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.constraints", description=__doc__)
    parser.add_argument("--quick", action="store_const", const="tiny", default="160m", dest="size", help="tiny models")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-constraints.md"))
    options = parser.parse_args()
    workload, _ = plan_workloads(options.size)
    started_s, measured = time.monotonic(), Measurements()
    directory = Path(tempfile.mkdtemp(prefix="kiln-bench-"))
    try:
        write_checkpoint(directory / "models" / MODEL, workload)
        with contextlib.ExitStack() as stack:
            _measure(workload, directory, measured, stack)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    page = _render(measured, workload, time.monotonic() - started_s)
    options.output.write_text(page)
    print(page)


def _measure(workload: Workload, work: Path, measured: Measurements, stack: contextlib.ExitStack) -> None:
    services = stack.enter_context(running_services(work / "home", work / "models"))
    batch = workload.batches[-1]
    servers: dict[tuple[str, str], Server] = {}
    say("compiling")
    for engine, runtime in dict.fromkeys((CASES[name].engine, CASES[name].runtime) for name in _NAMES):
        server = stack.enter_context(running_server(services, work / f"{engine}-{runtime}", [RUNTIMES[runtime]]))
        digest = compile_bundle(services, engine, workload.bundles[decode_bundle(batch, engine)], MODEL).digest
        stack.enter_context(deployed(server, digest, 2))
        servers[engine, runtime] = server
    clients = stack.enter_context(Worker("bench.streams"))

    def measure(name: str) -> dict[str, Any]:
        case = CASES[name]
        return measure_streams(clients, servers[case.engine, case.runtime], workload, batch, case.options)

    for name in _NAMES:
        # What comes first is slower.
        measure(name)
    for number in range(_NUM_ROUNDS):
        say(f"round {number + 1} of {_NUM_ROUNDS}")
        measured.begin_round()
        load = OtherLoad()
        for name in _NAMES if number % 2 == 0 else reversed(_NAMES):
            answer = measure(name)
            measured.add(name, answer["step_s"])
            measured.add(f"{name}.cpu", batch * (answer["front_cpu_s"] + answer["rank_cpu_s"]))
        for name in _WITH_GOALS:
            for of in ("", ".cpu"):
                times = measured.this_round(name + of) / measured.this_round(CASES[name].reference + of)
                measured.pool(f"{name}{of}.times", [times])
        measured.add("others", load.measure().others)


def _render(measured: Measurements, workload: Workload, duration_s: float) -> str:
    introduction = (
        f"# Constraints\n\nWritten by `python -m bench.constraints`, in {duration_s / 60:.0f} minutes: the model, the "
        "threads and the requests of\n[generation](RESULTS-generation.md), in bundles that are deployed side by side "
        "and measured in turns. A\nconstrained case is compared with the one above it, which is measured next to it in "
        f"the same deployment.\nTimes are medians of {_NUM_ROUNDS} rounds, ratios medians of the rounds' ratios, with "
        f"their quartiles. {LEGEND}\n\n"
        f"Machine: {describe_machine()}. Other processes took up to {measured.range('others')[1]:.0%} of it in a round."
    )
    rows: list[Row] = []
    for name in _NAMES:
        case = CASES[name]
        least, greatest = measured.range(name)
        facts = ["", "", ""]
        if name in _WITH_GOALS:
            facts = [*(_describe_times(measured, f"{name}{of}.times") for of in ("", ".cpu")), f"≤ {case.goal}"]
        rows.append(
            (
                case.title,
                f"{measured.typical(name) * 1e3:.1f} ms ({least * 1e3:.1f}–{greatest * 1e3:.1f})",
                f"{measured.typical(f'{name}.cpu') * 1e3:.1f} ms",
                *facts,
            )
        )
    head = ("requests", "time", "CPU", "times", "CPU, times", "goal")
    table = render_table(head, rows)
    return f"{introduction}\n\n## A step of {count_streams(workload.batches[-1])}\n\n{table}\n"


def _describe_times(measured: Measurements, name: str) -> str:
    """The median and the quartiles."""
    first, middle, third = (measured.percentile(name, percent) for percent in (25, 50, 75))
    return f"{middle:.3f} ({first:.2f}–{third:.2f})"


if __name__ == "__main__":
    main()
