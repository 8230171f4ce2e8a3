"""Two minutes of the soak that `make soak` runs for half an hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing import SEED
from tests.repository import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_everything_at_once(run_directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.soak",
        "--minutes=2",
        f"--seed={SEED}",
        f"--bundles={run_directory / 'bundles'}",
    ]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, f"{outcome.stdout[-8000:]}\n{outcome.stderr[-4000:]}"
