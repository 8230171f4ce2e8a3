"""Tests that count as slow until they are mended: `tests/quarantine.toml` names them and says why.

`python -m tests.turns.quarantine` runs each of them twenty times, and takes out those that always pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.repository import ROOT

FILE: Final = ROOT / "tests/quarantine.toml"
MAX_ROWS: Final = 10
NUM_PASSES: Final = 20


@dataclass(frozen=True)
class Quarantined:
    """A row.

    Attributes:
        test: Its id, as pytest prints it.
        since: The day, in ISO 8601.
        reason: What is known of the fault.
        seen: How it failed.
    """

    test: str
    since: str
    reason: str
    seen: str


def read_rows(path: Path = FILE) -> list[Quarantined]:
    return [Quarantined(**row) for row in tomllib.loads(path.read_text()).get("test", [])]


def write_rows(rows: Iterable[Quarantined], path: Path = FILE) -> None:
    """Writes rows behind the file's first comment."""
    comment = path.read_text().partition("\n[[")[0].rstrip()
    fields = ([f"{key} = {json.dumps(value)}" for key, value in asdict(row).items()] for row in rows)
    path.write_text("\n\n".join([comment, *("\n".join(["[[test]]", *lines]) for lines in fields)]) + "\n")


def passes(test: str) -> bool:
    """Whether a test passes twenty times in a row, each time alone."""
    command = [sys.executable, "-m", "pytest", "--quiet", test]
    return all(subprocess.run(command, cwd=ROOT, check=False).returncode == 0 for _ in range(NUM_PASSES))


def find_unknown(tests: Sequence[str]) -> set[str]:
    """Those of the tests that pytest does not find as slow ones in their files."""
    files = sorted({file for test in tests if (ROOT / (file := test.partition("::")[0])).exists()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-m", "slow", *files]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    return {*tests} - {*listed.splitlines()}


def release(path: Path = FILE) -> None:
    """Takes out the rows of tests that pass, and says which stay."""
    rows = read_rows(path)
    kept = [row for row in rows if not passes(row.test)]
    write_rows(kept, path)
    for row in rows:
        sys.stdout.write(f"{'stays' if row in kept else 'leaves'}: {row.test}\n")


if __name__ == "__main__":
    release()
