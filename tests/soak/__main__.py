"""`python -m tests.soak --minutes 30 --seed N`: attacks a runtime with everything at once, and exits with 1 if it finds
anything that must not be.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.repository import ROOT
from tests.soak.memory import MemorySampler
from tests.soak.services import run_services
from tests.soak.site import Site
from tests.soak.soak import MAX_STALL_S, Report, soak
from tests.soak.witness import INTERVAL_S

#: Seconds between two lines where the output is no terminal, whose line would move.
LINE_INTERVAL_S = 15


def main() -> int:
    """Runs a soak, prints its report, and gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--seed", type=int, help="repeats the choices of a run (default: another one each time)")
    parser.add_argument(
        "--bundles", type=Path, default=ROOT / ".kiln/soak", help="where compiled bundles are kept (.kiln/soak)"
    )
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    sys.stderr.write(f"seed {seed}\n")
    with (
        tempfile.TemporaryDirectory(prefix="kiln-soak-") as directory,
        run_services(Path(directory), arguments.bundles) as services,
    ):
        report = asyncio.run(soak(services, minutes=arguments.minutes, seed=seed, show=show))
    sys.stdout.write(render(report))
    return int(bool(report.findings))


def show(site: Site, sampler: MemorySampler, minutes: float) -> None:
    """Prints how far a run is: one line that moves in a terminal, a line now and then elsewhere."""
    elapsed_s = time.monotonic() - site.begun_s
    line = (
        f"{elapsed_s:6.0f} s of {minutes * 60:.0f}  {site.num_streams:6} streams  {site.num_compared:6} compared  "
        f"{site.windows.opened.total():4} faults and operations  runtime {sampler.last_mb('runtime'):6.1f} MB  "
        f"{len(site.findings)} findings"
    )
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{line}\x1b[K")
    elif int(elapsed_s) % LINE_INTERVAL_S == 0:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def render(report: Report) -> str:
    """Returns the tables of a report, in Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    site = report.site
    yield f"\n{report.minutes:g} minutes, seed {report.seed}: {site.num_streams} streams;"
    yield f"{site.num_compared} whole greedy answers compared with their references.\n"
    yield "| behaviour, operation | end | calls |"
    yield "|---|---|---:|"
    for name, ends in site.ends.items():
        for end, count in ends.most_common():
            yield f"| {name} | {end} | {count} |"
    yield "\n| fault, operation | done |"
    yield "|---|---:|"
    yield from (f"| {name} | {count} |" for name, count in site.windows.opened.items())
    yield from (f"| {name} | left out: {reason} |" for name, reason in report.left_out.items())
    yield "\n| memory of | slope, MB/h | error | at the end, MB |"
    yield "|---|---:|---:|---:|"
    for group, slope in report.slopes.items():
        yield f"| {group} | {slope.mb_per_hour:+.1f} | {slope.error:.1f} | {slope.last_mb:.1f} |"
    if report.stalls:
        yield f"\n| health every {INTERVAL_S * 1000:.0f} ms, {report.stalls['num_checks']} checks | p50 | p99 | max |"
        yield "|---|---:|---:|---:|"
        for what, title in (("latency", "answer, ms"), ("stall", "without waits for a processor, ms")):
            figures = report.stalls[what]
            yield f"| {title} | " + " | ".join(f"{figures[name] * 1000:.1f}" for name in ("p50", "p99", "max")) + " |"
        yield f"\nAt most {MAX_STALL_S * 1000:.0f} ms may remain without waits for a processor."
    yield f"\n{len(report.findings)} findings" + (":" if report.findings else ".")
    yield from (f"- {finding}" for finding in report.findings)


if __name__ == "__main__":
    sys.exit(main())
