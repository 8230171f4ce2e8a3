"""`python -m tests.turns.gate VERDICT`: runs `make test`, and decides whether the tree lands.

If a few tests fail, these run once more, alone, with those that never ran: if they pass, the tree lands, and they are
recorded as flaky. VERDICT is a file that gets one line, which says what decided.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from tests.parity.__main__ import read_commit
from tests.turns.outcomes import Outcomes
from tests.turns.record import FlakyTest, find_state, flaky_record

#: A tree that breaks more tests than this is broken.
MAX_FAILED: Final = 10
#: With which verdicts begin.
LANDS: Final = "lands"
STAYS: Final = "does not land"


def main() -> int:
    """Gives 0 if the tree lands."""
    verdict = decide(Path.cwd(), find_state())
    Path(sys.argv[1]).write_text(f"{verdict}\n")
    return int(not verdict.startswith(LANDS))


def decide(tree: Path, state: Path) -> str:
    """Runs the tests of a tree, some of them twice; gives the verdict, which begins with LANDS or STAYS."""
    with tempfile.TemporaryDirectory() as directory:
        first = Path(directory) / "first.json"
        code = subprocess.run(["make", "test", f"OUTCOMES={first}"], cwd=tree, check=False).returncode
        outcomes = Outcomes.read(first)
        if outcomes is None:
            return f"{STAYS}: make test ended with exit code {code}, and no test had run to its end"
        if reason := explain(outcomes):
            return f"{STAYS}: {reason}"
        tests = [*outcomes.failed, *outcomes.unrun]
        if not tests:
            return f"{LANDS}: make test passed" if code == 0 else f"{STAYS}: make test ended with exit code {code}"
        say(f"to run once more, alone: {len(outcomes.failed)} that failed, {len(outcomes.unrun)} that never ran")
        again = run_alone(tests, tree, Path(directory) / "second.json")
    if again is None or again.exit_code != pytest.ExitCode.OK or again.unrun:
        return f"{STAYS}: alone, too, failed {' '.join(again.failed if again else tests)}"
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    for test in outcomes.failed:
        flaky_record(state).add(FlakyTest(test, ended, read_commit()))
    say(f"flaky: {' '.join(outcomes.failed)}")
    return f"{LANDS}: make test passed but for {len(outcomes.failed)} tests, which passed alone"


def explain(outcomes: Outcomes) -> str:
    """Why no second run can help; empty if one can, or need not."""
    if outcomes.uncollected:
        return f"pytest could not collect {' '.join(outcomes.uncollected)}"
    if outcomes.exit_code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return f"pytest ended with exit code {outcomes.exit_code}"
    if len(outcomes.failed) > MAX_FAILED:
        return f"{len(outcomes.failed)} tests failed"
    return ""


def run_alone(tests: list[str], tree: Path, path: Path) -> Outcomes | None:
    """Runs tests one after the other in a worker, so that its death is told."""
    names = path.with_suffix(".txt")
    names.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "--numprocesses=1", "--max-worker-restart=0", f"@{names}"]
    subprocess.run([*command, "-p", "tests.turns.outcomes", f"--outcomes={path}"], cwd=tree, check=False)
    return Outcomes.read(path)


def say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
