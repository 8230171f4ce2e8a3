"""`python -m bench.constraints`: steps of constrained rows beside those of others, in many turns, for their goal.

The runtimes that `bench.generation` measures one after the other serve side by side here, and idle while another one is
measured. Rounds go through them back and forth, so that a host whose pace changes does not decide.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from operator import truediv
from pathlib import Path
from typing import Final

from bench.checkpoint import write_checkpoint
from bench.generation import CASES, RUNTIMES, plan_workloads
from bench.machine import describe_machine
from bench.measurements import Measurements
from bench.other_load import OtherLoad
from bench.plan import Workload, decode_bundle
from bench.run import MODEL, say
from bench.services import Server, compile_bundle, deployed, measure_streams, running_server, running_services
from bench.tables import Row, count_streams, render_table
from bench.worker import Worker

#: Those that have a goal, behind what it is a goal beside.
_NAMES: Final = ("stepwise-drawn", *(name for name, case in CASES.items() if case.goal is not None))
_NUM_ROUNDS: Final = 20


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.constraints", description=__doc__)
    parser.add_argument("--quick", action="store_const", const="tiny", default="160m", dest="size", help="tiny models")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-constraints.md"))
    options = parser.parse_args()
    assert {CASES[name].reference for name in _NAMES[1:]} == {_NAMES[0]}, "all have the same goal"
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
    servers: dict[str, Server] = {}
    say("compiling")
    for name in _NAMES:
        case, config = CASES[name], workload.bundles[decode_bundle(batch, CASES[name].engine)]
        servers[name] = stack.enter_context(running_server(services, work / name, [RUNTIMES[case.runtime]]))
        digest = compile_bundle(services, case.engine, config, MODEL).digest
        stack.enter_context(deployed(servers[name], digest, 2))
    clients = stack.enter_context(Worker("bench.streams"))
    for name in _NAMES:
        # What comes first is slower.
        measure_streams(clients, servers[name], workload, batch, CASES[name].options)
    for number in range(_NUM_ROUNDS):
        say(f"round {number + 1} of {_NUM_ROUNDS}")
        measured.begin_round()
        load = OtherLoad()
        for name in _NAMES if number % 2 == 0 else reversed(_NAMES):
            answer = measure_streams(clients, servers[name], workload, batch, CASES[name].options)
            measured.add(name, answer["step_s"])
            measured.add(f"{name}.cpu", batch * (answer["front_cpu_s"] + answer["rank_cpu_s"]))
        measured.add("others", load.measure().others)


def _render(measured: Measurements, workload: Workload, duration_s: float) -> str:
    introduction = (
        f"# Constraints\n\nWritten by `python -m bench.constraints`, in {duration_s / 60:.0f} minutes: the model, the "
        "threads and the requests of\n[generation](RESULTS-generation.md), in bundles that are deployed side by side "
        f"and measured in turns. Times are\nmedians of {_NUM_ROUNDS} rounds, ratios medians of the rounds' ratios. "
        "*CPU* is of the front and the rank, not of the\nprocesses that find masks.\n\n"
        f"Machine: {describe_machine()}. Other processes took up to {measured.range('others')[1]:.0%} of it in a round."
    )
    rows: list[Row] = []
    for name in _NAMES:
        least, greatest = measured.range(name)
        ratios = [measured.relate(truediv, name + of, _NAMES[0] + of) for of in ("", ".cpu")]
        goal = CASES[name].goal
        rows.append(
            (
                CASES[name].title,
                f"{measured.typical(name) * 1e3:.1f} ms ({least * 1e3:.1f}–{greatest * 1e3:.1f})",
                f"{measured.typical(f'{name}.cpu') * 1e3:.1f} ms",
                *(f"{ratio:.3f}" for ratio in ratios),
                "" if goal is None else f"≤ {goal}",
            )
        )
    head = ("requests", "time", "CPU", "times", "CPU, times", "goal")
    table = render_table(head, rows)
    return f"{introduction}\n\n## A step of {count_streams(workload.batches[-1])}\n\n{table}\n"


if __name__ == "__main__":
    main()
