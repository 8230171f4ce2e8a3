"""Every test is in a ring, and the pages name the rings that there are."""

from __future__ import annotations

import subprocess

import pytest

from tests.repository import ROOT
from tests.rings import RINGS, ring_of
from tests.turns.choice import WATCHED, sources_of


def test_every_test_is_in_a_ring() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "tests/**/test_*.py", "tests/test_*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {ring_of(path) for path in listed if (ROOT / path).exists()} == set(RINGS)


def test_a_file_beside_the_rings_is_refused() -> None:
    with pytest.raises(ValueError, match="in none of the folders parity, system, "):
        ring_of("tests/ranks/test_toy.py")


def test_contributing_lists_the_rings() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    rows = [line.split("`")[1] for line in lines if line.startswith("| `tests/")]
    assert sorted(rows) == sorted(f"tests/{ring}/" for ring in RINGS)


def test_every_slow_file_watches_sources() -> None:
    command = ["git", "grep", "--name-only", "-e", r"mark\.slow", "--", "tests/**/test_*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sources = [source for file in files for source in sources_of(file)]
    assert len(files) > 40
    assert [path for path in [*sources, *WATCHED] if not (ROOT / path).exists()] == []
