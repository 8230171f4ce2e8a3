"""`python -m tests.parity`: runs the whole matrix, from where an interrupted run stopped, and writes its page."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

from tests.parity.record import RECORD_VARIABLE, ParityRecord, write_results
from tests.repository import ROOT, list_tracked

PAGE = ROOT / "docs/models.md"
#: What results depend on: a change of any of it that git knows begins a new run.
SOURCES = ("bundle", "compiler_svc", "execution", "runtime_svc", "targets", "tests/parity")
SUFFIXES = {".py", ".cpp", ".h"}
NO_TESTS_LEFT = 5


def main() -> int:
    """Runs what has not passed yet, writes the page; gives the exit code."""
    path = ROOT / ".kiln/parity" / f"{digest_sources()}.jsonl"
    command = [sys.executable, "-m", "pytest", "tests/parity", *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {RECORD_VARIABLE: str(path)}, check=False).returncode
    page = write_results(PAGE.read_text(), ParityRecord(path).results().values(), read_commit())
    PAGE.write_text(page)
    return 0 if code == NO_TESTS_LEFT else code


def digest_sources() -> str:
    """Sixteen hexadecimal digits that change with the sources."""
    digest = hashlib.sha256()
    for name in list_tracked(*SOURCES):
        file = ROOT / name
        if file.suffix in SUFFIXES:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def read_commit() -> str:
    """The commit, with a plus sign if the tree has changes."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
