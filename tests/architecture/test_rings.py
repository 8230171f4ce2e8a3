"""Every test is in a ring, and the pages name the rings that there are."""

from __future__ import annotations

import subprocess

import pytest

from tests.repository import ROOT, list_tracked
from tests.rings import RINGS, list_times, render_rows, ring_of
from tests.turns.choice import WATCHED, sources_of


def test_every_test_is_in_a_ring() -> None:
    assert {ring_of(path) for path in list_tracked("tests/**/test_*.py", "tests/test_*.py")} == set(RINGS)


def test_a_file_beside_the_rings_is_refused() -> None:
    with pytest.raises(ValueError, match="in none of the folders device, parity, "):
        ring_of("tests/ranks/test_toy.py")


def test_contributing_lists_the_rings_and_their_budgets() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `tests/")] == render_rows()


def test_a_run_prints_budgets_that_four_workers_spend_in_ten_minutes() -> None:
    lines = list(list_times({"unit": 61.25, "device": 1.0}, {"unit": 3, "device": 1}))
    assert lines == ["device           1 tests     1.0 s", "unit             3 tests    61.2 s of 240"]
    assert sum(ring.minutes or 0 for ring in RINGS.values()) == 38


def test_every_slow_file_watches_sources() -> None:
    command = ["git", "grep", "--name-only", "-e", r"mark\.slow", "--", "tests/**/test_*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert [file for file in files if not sources_of(file)] == []
    sources = [source for file in files for source in sources_of(file)]
    assert len(files) > 40
    assert [path for path in [*sources, *WATCHED] if not (ROOT / path).exists()] == []
