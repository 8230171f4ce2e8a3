"""`make bench`: measures all engines in turns and writes RESULTS.md; see the package."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.checkpoint import count_parameters, write_checkpoint
from bench.measurements import Measurements
from bench.peers import PEERS, find_missing
from bench.plan import DEFAULT, FORMAT_WORKLOADS, LARGE, LARGE_FORMATS, QUICK, QUICK_FORMATS, WORKLOADS, Workload
from bench.report import Section, render
from bench.run import MODEL, Run, say

HERE: Final = Path(__file__).parent
#: What `--quick` measures says nothing, so no page of the tree gets it.
QUICK_PAGE: Final = HERE.parent / ".kiln" / "RESULTS-quick.md"


#: What is measured, the page and the command, by whether formats are compared and by the size of the models.
_RUNS: Final[Mapping[tuple[bool, str], tuple[Sequence[Workload], Path, str]]] = {
    (False, ""): (DEFAULT, HERE / "RESULTS.md", "make bench"),
    (False, "large"): ((LARGE,), HERE / "RESULTS-large.md", "make bench-large"),
    (False, "quick"): (QUICK, QUICK_PAGE, "python -m bench --quick"),
    (True, ""): (FORMAT_WORKLOADS, HERE / "RESULTS-formats.md", "make bench-formats"),
    (True, "large"): (LARGE_FORMATS, HERE / "RESULTS-formats-large.md", "python -m bench --formats --large"),
    (True, "quick"): (QUICK_FORMATS, QUICK_PAGE, "python -m bench --formats --quick"),
}


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="measure these, by their names")
    chosen.add_argument(
        "--large", dest="size", action="store_const", const="large", help="1.1 B parameters, into a page of its own"
    )
    chosen.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const="quick",
        help="tiny models: whether it runs, not how fast; into .kiln/RESULTS-quick.md",
    )
    parser.add_argument(
        "--formats", action="store_true", help="quantized weights and caches beside peers' and other dtypes, bare"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="engines beside Kiln")
    parser.add_argument("--output", type=Path, help="the page to write, if not its own")
    options = parser.parse_args()
    workloads, page, command = _RUNS[options.formats, options.size or ""]
    if options.workloads:
        workloads = [WORKLOADS[name] for name in options.workloads]
        command = f"python -m bench --workloads {' '.join(options.workloads)}"
    missing = find_missing(peer for peer in options.peers if any(peer in one.peers for one in workloads))
    for peer, why in missing.items():
        say(f"{PEERS[peer].title} is left out: {why}")
    output = options.output or page
    # If the run is told to end, it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    start_s = time.monotonic()
    sections: list[Section] = []
    for workload in workloads:
        sections.append(measure(workload, options.peers, missing))
        # A run that ends early leaves the page of what it had measured.
        duration_s = time.monotonic() - start_s
        output.parent.mkdir(exist_ok=True)
        output.write_text(render(sections, command, duration_s))
    print(output.read_text())


def measure(workload: Workload, peers: Collection[str], missing: Mapping[str, str]) -> Section:
    """Measures one workload beside some peers, unless they are missing. The section says why something is."""
    say(f"{workload.name}: writing the checkpoint")
    directory = Path(tempfile.mkdtemp(prefix="kiln-bench-"))
    raced = [peer for peer in workload.peers if peer in peers]
    measured = Measurements(failures={PEERS[peer].title: missing[peer] for peer in raced if peer in missing})
    try:
        write_checkpoint(directory / "models" / MODEL, workload)
        num_parameters, num_read = count_parameters(directory / "models" / MODEL)
        with measured.attempt("what the services are needed for"), contextlib.ExitStack() as stack:
            run = Run(workload, directory, stack, measured)
            for peer in raced:
                if peer not in missing:
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
