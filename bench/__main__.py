"""`make bench`: measures all engines in turns and writes RESULTS.md; see the package."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.checkpoint import count_parameters, write_checkpoint
from bench.peers import PEERS
from bench.plan import DEFAULT, LARGE, QUICK, WORKLOADS, Workload
from bench.report import Section, render
from bench.run import MODEL, Run, say

HERE = Path(__file__).parent


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=[one.name for one in DEFAULT], help="what is measured"
    )
    parser.add_argument("--large", action="store_true", help=f"measure {LARGE.name} alone, into RESULTS-large.md")
    parser.add_argument("--quick", action="store_true", help="tiny models: whether it runs, not how fast")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="engines beside Kiln")
    parser.add_argument("--output", type=Path, help="the page to write; RESULTS.md beside the benchmark, if left out")
    options = parser.parse_args()
    workloads = (
        (LARGE,) if options.large else QUICK if options.quick else [WORKLOADS[name] for name in options.workloads]
    )
    # If the run is told to end, it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sections = [measure(workload, options.peers) for workload in workloads]
    text = render(sections, "make bench-large" if options.large else "make bench")
    output = options.output or HERE / ("RESULTS-large.md" if options.large else "RESULTS.md")
    output.write_text(text)
    print(text)


def measure(workload: Workload, peers: Sequence[str]) -> Section:
    """Measures one workload.

    Args:
        workload: What is measured.
        peers: Names of the engines beside Kiln.
    """
    say(f"{workload.name}: writing the checkpoint")
    directory = Path(tempfile.mkdtemp(prefix="kiln-bench-"))
    try:
        with contextlib.ExitStack() as stack:
            write_checkpoint(directory / "models" / MODEL, workload)
            run = Run(workload, directory, stack)
            for peer in peers:
                run.add_peer(peer)
            for number in range(workload.rounds):
                say(f"round {number + 1} of {workload.rounds}")
                run.measure_round()
            say("profiling")
            run.profile()
        return Section(workload, run.measured, *count_parameters(directory / "models" / MODEL))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
