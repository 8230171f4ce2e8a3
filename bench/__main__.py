"""`make bench`: measures all engines in turns and writes RESULTS.md; see the package."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.checkpoint import count_parameters, write_checkpoint
from bench.measurements import Measurements
from bench.peers import PEERS
from bench.plan import DEFAULT, LARGE, QUICK, WORKLOADS, Workload
from bench.report import Section, render
from bench.run import MODEL, Run, say

HERE: Final = Path(__file__).parent
#: What `--quick` measures says nothing, so no page of the tree gets it.
QUICK_PAGE: Final = HERE.parent / ".kiln" / "RESULTS-quick.md"


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=[one.name for one in DEFAULT], help="what is measured"
    )
    chosen.add_argument("--large", action="store_true", help=f"measure {LARGE.name} alone, into RESULTS-large.md")
    chosen.add_argument(
        "--quick", action="store_true", help="tiny models: whether it runs, not how fast; into .kiln/RESULTS-quick.md"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="engines beside Kiln")
    parser.add_argument("--output", type=Path, help="the page to write, if not its own")
    options = parser.parse_args()
    workloads: Sequence[Workload]
    if options.large:
        workloads, page, command = (LARGE,), HERE / "RESULTS-large.md", "make bench-large"
    elif options.quick:
        workloads, page, command = QUICK, QUICK_PAGE, "python -m bench --quick"
    else:
        workloads, page, command = [WORKLOADS[name] for name in options.workloads], HERE / "RESULTS.md", "make bench"
    output = options.output or page
    # If the run is told to end, it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    start_s = time.monotonic()
    sections: list[Section] = []
    for workload in workloads:
        sections.append(measure(workload, options.peers))
        # A run that ends early leaves the page of what it had measured.
        duration_s = time.monotonic() - start_s
        output.parent.mkdir(exist_ok=True)
        output.write_text(render(sections, command, duration_s))
    print(output.read_text())


def measure(workload: Workload, peers: Sequence[str]) -> Section:
    """Measures one workload. What fails is missing, and the section says why."""
    say(f"{workload.name}: writing the checkpoint")
    directory = Path(tempfile.mkdtemp(prefix="kiln-bench-"))
    measured = Measurements()
    try:
        write_checkpoint(directory / "models" / MODEL, workload)
        num_parameters, num_read = count_parameters(directory / "models" / MODEL)
        with measured.attempt("what the services are needed for"), contextlib.ExitStack() as stack:
            run = Run(workload, directory, stack, measured)
            for peer in peers if workload.raced else ():
                run.add_peer(peer)
            for number in range(workload.rounds):
                say(f"round {number + 1} of {workload.rounds}")
                run.measure_round(number)
            say("profiling")
            run.profile()
        return Section(workload, measured, num_parameters, num_read)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
