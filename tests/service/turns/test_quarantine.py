"""Tests in quarantine: few, each of them there, and out again when they pass."""

from __future__ import annotations

from dataclasses import astuple
from datetime import date
from pathlib import Path

import pytest

from tests.turns import quarantine
from tests.turns.quarantine import FILE, MAX_ROWS, Quarantined, find_unknown, read_rows, write_rows

ROWS = [
    Quarantined("tests/a.py::test_a[1-\n]", "2026-11-28", 'a "race"', "no session within 60 s\nin CI"),
    Quarantined("tests/b.py::test_b", "2026-11-27", "unknown", "exit code -9"),
]


def test_rows_are_few_and_say_why() -> None:
    rows = read_rows()
    assert len(rows) <= MAX_ROWS
    assert all(all(astuple(row)) for row in rows)
    assert all(date.fromisoformat(row.since) for row in rows)
    assert len({row.test for row in rows}) == len(rows)


def test_rows_name_tests_that_exist() -> None:
    gone, quick = (
        "tests/unit/turns/test_gone.py::test_gone",
        "tests/service/turns/test_turns.py::test_each_file_is_recorded",
    )
    there = "tests/service/turns/test_turns.py::test_no_test_begins_once_the_time_is_over"
    assert find_unknown([gone, quick, there, *(row.test for row in read_rows())]) == {gone, quick}


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.toml"
    path.write_text(FILE.read_text())
    for rows in (ROWS, ROWS[1:], []):
        write_rows(rows, path)
        assert read_rows(path) == rows
    assert path.read_text().startswith("# Tests that fail without a fault of the code")


def test_what_passes_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quarantine.toml"
    path.write_text("# Why\n")
    write_rows(ROWS, path)
    monkeypatch.setattr(quarantine, "passes", lambda test: test == ROWS[0].test)
    quarantine.release(path)
    assert read_rows(path) == ROWS[1:]
