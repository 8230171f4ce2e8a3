"""`python -m tests.turns`: runs slow tests, each file in a pytest of its own that has a limit, and says which are due.

    python -m tests.turns                  the files that a change of the last day concerns, uncommitted ones included
    python -m tests.turns FILE …           these
    python -m tests.turns --minutes 20     what changed, what failed, what waited longest, for so long; then the matrix
    python -m tests.turns --report         nothing: what is known of earlier runs

Results stay in $KILN_CI_STATE, by default ~/.cache/kiln/ci.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from tests.parity.__main__ import digest_sources, read_commit
from tests.parity.cases import all_cases
from tests.parity.record import RECORD_VARIABLE, ParityRecord
from tests.turns.choice import choose_files, find_touched
from tests.turns.reaper import LATE, LEAVE_S
from tests.turns.record import FileResult, find_state, flaky_record, last_runs, limit_of, slow_record
from tests.turns.report import render_report, render_rows

MATRIX: Final = "tests/parity/test_parity.py"
NUM_WORKERS: Final = 2
#: What runs when the time is over is interrupted so much later, and killed after two minutes; no test begins any more.
GRACE_S: Final = 120.0 - LEAVE_S
#: Tests of one file follow each other, so a worker may be idle in the end.
USABLE: Final = 0.9
DAY_S: Final = 24 * 3600
PYTEST: Final = (sys.executable, "-m", "pytest", "-m", "slow")


def main() -> int:
    """Runs or reports; gives the exit code: 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.turns", description=__doc__.partition(":")[2])
    parser.add_argument("files", nargs="*", help="test files to run (those that a change of the last day concerns)")
    parser.add_argument("--minutes", type=float, help="take files by turns, for so long")
    parser.add_argument("--report", action="store_true", help="print what is known of earlier runs, and run nothing")
    arguments = parser.parse_args()
    end = float("inf") if arguments.minutes is None else time.time() + 60 * arguments.minutes
    directory = find_state()
    record = slow_record(directory)
    files = arguments.files or collect()
    if arguments.report:
        sys.stdout.write(render_report(files, record.read(), flaky_record(directory).read(), count_parity(directory)))
        return 0
    if not arguments.files:
        files = choose(files, record.read(), end)
    num_before = len(record.read())
    code = Turns(directory, end).run(files, has_matrix=arguments.minutes is not None)
    ran = last_runs(record.read()[num_before:])
    sys.stdout.write(render_rows("Ran", ran, ran))
    sys.stdout.write(render_rows("Due", [file for file in files if file not in ran], last_runs(record.read())))
    return int(code or any(result.has_failed for result in ran.values()))


def choose(files: list[str], results: list[FileResult], end: float) -> list[str]:
    """What changed, and if the time has an end, what else fits into it."""
    touched = find_touched(files, read_changes())
    if end == float("inf"):
        return sorted(touched)
    now = time.time()
    budget_s = NUM_WORKERS * USABLE * (end - now)
    return choose_files(files, results, touched, day=int(now / DAY_S), budget_s=budget_s)


def collect() -> list[str]:
    """Every file that has slow tests, but the matrix and what needs other environments."""
    command = [*PYTEST, "--collect-only", "-q", "--ignore=tests/device", f"--ignore={MATRIX}"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if listed.returncode != 0:
        sys.exit(f"pytest cannot collect the slow tests:\n{listed.stdout}")
    return sorted({line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line})


def read_changes() -> list[str]:
    """Paths in which the tree differs from that of a day ago."""
    before = git("rev-list", "--max-count=1", "--first-parent", "--before=1.day", "HEAD").strip()
    if not before:
        sys.stdout.write("No commit here is older than a day, as in a shallow clone: what changed is unknown\n")
        return []
    untracked = git("ls-files", "--others", "--exclude-standard")
    return [*git("diff", "--name-only", before).splitlines(), *untracked.splitlines()]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def find_matrix(directory: Path) -> Path:
    """The matrix's record: another one whenever its sources change."""
    return directory / f"parity-{digest_sources()}.jsonl"


def count_parity(directory: Path) -> str:
    return f"{len(ParityRecord(find_matrix(directory)).passed())} of {len(all_cases())}"


@dataclass(frozen=True)
class Turns:
    """A run of files, two at a time.

    Attributes:
        directory: What CI keeps.
        end: Seconds since 1970 from which no test begins.
    """

    directory: Path
    end: float

    def run(self, files: Sequence[str], *, has_matrix: bool) -> int:
        """Runs files in this order, then what the matrix has left; gives 1 if a file failed, whatever was recorded."""
        matrix = [MATRIX] if has_matrix and Path(MATRIX).exists() else []
        with ThreadPoolExecutor(NUM_WORKERS) as lanes:
            codes = list(lanes.map(self.run_file, [*files, *matrix]))
        return int(any(codes))

    def run_file(self, file: str) -> int:
        """Runs a file's slow tests until its limit or the end; gives pytest's code, 0 if there was nothing to run."""
        left_s = self.end + GRACE_S - time.time()
        limit_s = left_s if file == MATRIX else limit_of(file, slow_record(self.directory).read())
        if time.time() >= self.end:
            return 0
        command = [*(sys.executable, "-m", "tests.turns.reaper", str(min(limit_s, left_s))), *PYTEST, file]
        command += ["-p", "tests.turns.recorder", f"--turns-record={slow_record(self.directory).path}"]
        command += [f"--turns-commit={read_commit()}", f"--turns-end={self.end}"]
        variables = {"KILN_FUZZ_SHARE": "1", RECORD_VARIABLE: str(find_matrix(self.directory))}
        code = subprocess.run(command, env=os.environ | variables, check=False).returncode
        if code != LATE:
            return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
        if limit_s > left_s or file == MATRIX:
            return 0
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        slow_record(self.directory).add(FileResult(file, ended, read_commit(), limit_s, 0, has_hung=True))
        return code


if __name__ == "__main__":
    sys.exit(main())
