"""`python -m tests.first_hour`: acts as six kinds of new users on a fresh clone, and writes `docs/first-hour.md`.

With words, only the users whose names have one of them act, after the first command of all, which makes the
environment; the page goes to standard output.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bench.checkpoint import write_checkpoint
from bench.plan import DEFAULT
from bench.plan import LARGE as LARGE_WORKLOAD
from tests.first_hour.commands import find_command
from tests.first_hour.page import Result, render_page
from tests.first_hour.steps import LARGE, SMALL, STEPS
from tests.first_hour.terminal import Terminal
from tests.repository import ROOT

PAGE = ROOT / "docs/first-hour.md"


def main(words: list[str]) -> int:
    """Acts, writes the page, and returns the exit code: 1 if a step failed."""
    with tempfile.TemporaryDirectory(prefix="kiln-first-hour-") as scratch:
        clone, data_home = Path(scratch, "kiln"), Path(scratch, "data")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for step in STEPS:
            find_command(step, clone)
        write_checkpoint(clone / SMALL, DEFAULT[0])
        write_checkpoint(clone / LARGE, LARGE_WORKLOAD)
        commit = read_commit(clone)
        places = {str(clone): "~/kiln", str(data_home): "~/.local/share", scratch: "/tmp", str(Path.home()): "~"}
        try:
            results = list(act(clone, data_home, words))
        finally:
            kiln = clone / ".venv/bin/kiln"
            for home in (data_home / "kiln", clone / f"{SMALL}-home", clone / f"{LARGE}-home"):
                if kiln.exists() and home.exists():
                    subprocess.run([kiln, "down", "--home", home], stdout=subprocess.DEVNULL, check=False)
        page = render_page(results, commit=commit, host=describe_host(), places=places)
    if words:
        sys.stdout.write(page)
    else:
        PAGE.write_text(page)
    return int(any(result.has_failed for result in results))


def act(clone: Path, data_home: Path, words: list[str]) -> Iterator[Result]:
    """Gives the commands of all users, one user after the other, each in a terminal of its own."""
    chosen = [step for step in STEPS if not words or step is STEPS[0] or any(word in step.user for word in words)]
    for _, steps in groupby(chosen, key=lambda step: step.user):
        with Terminal(clone, data_home) as terminal:
            for step in steps:
                printed = find_command(step, clone)
                if step.needs is not None and not terminal.has(step.needs.test):
                    yield Result(step, printed, None, f"this host lacks {step.needs.what}")
                    continue
                outcome = terminal.give(step, printed)
                verdict = outcome.failure or "done"
                sys.stderr.write(f"{outcome.seconds:8.1f} s  {printed.splitlines()[0]}: {verdict}\n")
                yield Result(step, printed, outcome)


def read_commit(clone: Path) -> str:
    """The commit of a clone."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True).stdout.strip()


def describe_host() -> str:
    """Processors and load, on which the seconds depend."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} processors ({platform.machine()}), where the load was {load:.1f} in the end"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
