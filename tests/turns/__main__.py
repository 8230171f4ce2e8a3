"""`python -m tests.turns --minutes 60`: runs a share of the slow tests, and says which ran and which are due.

First come test files that a change of the last day concerns, then those that failed, then those that waited longest;
the parity matrix goes on in the time that is left. Results stay in $KILN_CI_STATE, by default ~/.cache/kiln/ci.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.parity.__main__ import digest_sources, read_commit
from tests.parity.cases import all_cases
from tests.parity.conftest import RECORD_VARIABLE
from tests.parity.record import ParityRecord
from tests.repository import ROOT
from tests.turns.choice import choose_files, find_touched
from tests.turns.record import FileResult, TurnRecord

MATRIX: Final = "tests/parity/test_parity.py"
RECORD: Final = "slow-tests.jsonl"
NUM_WORKERS: Final = 2
#: Seconds before the end from which no test begins, from which those that run are interrupted, then killed.
LAST_BEGIN_S, INTERRUPT_S, KILL_S = 180, 60, 20
#: Tests of one file follow each other, so a worker may be idle in the end.
USABLE: Final = 0.9
DAY_S: Final = 24 * 3600
PYTEST: Final = (sys.executable, "-m", "pytest", "-m", "slow")


def main() -> int:
    """Runs or lists; gives the exit code: 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.turns", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="time for everything (30)")
    parser.add_argument("--list", action="store_true", help="print each file's last result, and run nothing")
    arguments = parser.parse_args()
    end = time.time() + 60 * arguments.minutes
    directory = find_state()
    record = TurnRecord(directory / RECORD)
    files = collect()
    if arguments.list:
        show("Last results", files, record.last_runs())
        return 0
    chosen = choose_files(
        files,
        record.last_runs(),
        find_touched(files, read_changes()),
        day=int(time.time() / DAY_S),
        budget_s=NUM_WORKERS * USABLE * (end - LAST_BEGIN_S - time.time()),
    )
    num_before = len(record.read())
    code = run(chosen, directory, end) if time.time() < end - LAST_BEGIN_S else 0
    results = record.read()[num_before:]
    ran = {result.file: result for result in results if result.has_run}
    show("Ran", list(ran), ran)
    show("Due", [file for file in files if file not in ran], record.last_runs())
    sys.stdout.write(
        f"Parity: {len(ParityRecord(find_matrix(directory)).passed())} of {len(all_cases())} cases have passed\n"
    )
    return int(code != 0 or any(result.failed for result in results))


def find_state() -> Path:
    """The directory that CI keeps; a temporary one if it cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get("KILN_CI_STATE") or cache / "kiln/ci")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RECORD).open("a").close()
    except OSError as error:
        directory = Path(tempfile.mkdtemp(prefix="kiln-ci-"))
        sys.stdout.write(f"Results are not kept: {error}\n")
    return directory


def find_matrix(directory: Path) -> Path:
    """The matrix's record: another one whenever its sources change."""
    return directory / f"parity-{digest_sources()}.jsonl"


def collect() -> list[str]:
    """Every file that has slow tests, but the matrix and what needs other environments."""
    command = [*PYTEST, "--collect-only", "-q", "--ignore=tests/device", f"--ignore={MATRIX}"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if listed.returncode != 0:
        sys.exit(f"pytest cannot collect the slow tests:\n{listed.stdout}")
    return sorted({line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line})


def read_changes() -> list[str]:
    """Paths in which the tree differs from that of a day ago."""
    before = git("rev-list", "--max-count=1", "--first-parent", "--before=1.day", "HEAD").strip()
    if not before:
        sys.stdout.write("No commit here is older than a day, as in a shallow clone: what changed is unknown\n")
        return []
    return git("diff", "--name-only", before, "HEAD").splitlines()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def run(files: list[str], directory: Path, end: float) -> int:
    """Runs the files, then what the matrix has left; gives pytest's code, 0 if the end of the time interrupted it."""
    command = [
        *(*PYTEST, *files, MATRIX, f"--numprocesses={NUM_WORKERS}", "--dist=loadfile", "--no-loadscope-reorder"),
        *("-p", "tests.turns.recorder", f"--turns-record={directory / RECORD}"),
        *(f"--turns-commit={read_commit()}", f"--turns-end={end - LAST_BEGIN_S}"),
    ]
    variables = {"KILN_FUZZ_SHARE": "1", RECORD_VARIABLE: str(find_matrix(directory))}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, start_new_session=True) as process:
        try:
            code = process.wait(end - INTERRUPT_S - time.time())
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_S - KILL_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return 0
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def show(title: str, files: list[str], results: Mapping[str, FileResult]) -> None:
    """Prints a row for each file: when it ended, at which commit, how long it took, and its result."""
    sys.stdout.write(f"\n{title}: {len(files)}\n")
    for file in files:
        result = results.get(file)
        row = f"{result.ended}  {result.commit:12} {result.seconds:7.1f} s  " if result else f"{'never':48}"
        sys.stdout.write(f"  {row}{file}  {result.summary if result else ''}\n")


if __name__ == "__main__":
    sys.exit(main())
