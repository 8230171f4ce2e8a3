"""A run of some test files: what it records of each, and how it ends when its time is over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.turns import __main__ as turns
from tests.turns.record import FileResult, TurnRecord

QUICK = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_number(number):
    if number == 1:
        pytest.skip("odd")
    assert number != {wrong}
"""
SLEEPING = """
import time
import pytest

pytestmark = pytest.mark.slow

def test_first():
    pass

def test_second():
    time.sleep({seconds})

def test_third():
    pass
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a matrix that is done, which runs are of."""
    tree = tmp_path / "tree"
    (tree / "tests/parity").mkdir(parents=True)
    (tree / turns.MATRIX).write_text("")
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = slow: minutes of work\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(turns, "ROOT", tree)
    monkeypatch.setattr(turns, "read_commit", lambda: "abc")
    return tree


def run(tree: Path, *, seconds: float = 600.0, **sources: str) -> tuple[int, dict[str, FileResult]]:
    for name, source in sources.items():
        (tree / f"test_{name}.py").write_text(source)
    code = turns.run([f"test_{name}.py" for name in sources], tree, time.time() + seconds)
    return code, {result.file: result for result in TurnRecord(tree / turns.RECORD).read()}


def test_each_file_is_recorded(tree: Path) -> None:
    code, results = run(tree, good=QUICK.format(wrong=9), bad=QUICK.format(wrong=2), other="def test_quick(): pass")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert {file: result.summary for file, result in results.items()} == {
        "test_good.py": "2 passed, 1 skipped",
        "test_bad.py": "1 passed, 1 skipped, 1 failed: test_number[2]",
    }
    assert {result.commit for result in results.values()} == {"abc"}


@pytest.mark.slow
def test_no_slow_test_is_no_failure(tree: Path) -> None:
    assert run(tree, other="def test_quick(): pass") == (0, {})


@pytest.mark.slow
def test_no_test_begins_once_the_time_is_over(tree: Path) -> None:
    begin_s = 6
    code, results = run(tree, seconds=turns.LAST_BEGIN_S + begin_s, long=SLEEPING.format(seconds=begin_s + 1))
    assert code == 0
    assert results["test_long.py"].summary == "2 passed, 1 due"
    assert not results["test_long.py"].has_run


@pytest.mark.slow
def test_what_runs_in_the_end_is_interrupted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LAST_BEGIN_S", 0)
    started = time.monotonic()
    code, results = run(tree, seconds=turns.INTERRUPT_S + 8, long=SLEEPING.format(seconds=300))
    assert time.monotonic() - started < 8 + turns.INTERRUPT_S - turns.KILL_S
    assert code == 0
    assert results["test_long.py"].summary == "1 passed, 1 due"
