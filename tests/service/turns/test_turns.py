"""Runs of slow test files: what is recorded of each, how files end at their limits and at the end of a run's time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.repository import ROOT
from tests.turns import __main__ as turns
from tests.turns.record import NEW_LIMIT_S, FileResult, last_runs, limit_of, slow_record

QUICK = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_number(number):
    if number == 1:
        pytest.skip("odd")
    assert number != {wrong}
"""
#: Leaves a process that leads a session, and whose parent has ended, and hangs in the second test.
HANGING = """
import subprocess
import sys
import time
import pytest

pytestmark = pytest.mark.slow

def test_first():
    code = "import subprocess, sys; subprocess.Popen(['sleep', '{mark}'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_second():
    time.sleep(600)

def test_third():
    pass
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of test files, without a matrix."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio\nmarkers = slow: minutes of work\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(turns, "read_commit", lambda: "abc")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(tree: Path, *, seconds: float = float("inf"), **sources: str) -> tuple[int, list[FileResult]]:
    """Runs files of these names and sources; gives the exit code and the record."""
    for name, source in sources.items():
        (tree / f"test_{name}.py").write_text(source)
    names = [f"test_{name}.py" for name in sources]
    code = turns.Turns(tree, time.time() + seconds).run(names, has_matrix=True)
    return code, slow_record(tree).read()


def find_sleepers(mark: str) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", mark]]


def test_each_file_is_recorded(tree: Path) -> None:
    code, results = run(tree, good=QUICK.format(wrong=9), bad=QUICK.format(wrong=2), other="def test_quick(): pass")
    assert code == 1
    assert {result.file: result.summary for result in results} == {
        "test_good.py": "2 passed, 1 skipped",
        "test_bad.py": "1 passed, 1 skipped, 1 failed: test_number[2]",
    }
    assert {result.commit for result in results} == {"abc"}


def test_a_hang_ends_its_file_alone_and_doubles_its_limit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the file has started is left."""
    mark, limit_s = f"100{os.getpid()}", 8.0
    monkeypatch.setattr("tests.turns.record.NEW_LIMIT_S", limit_s)
    monkeypatch.setattr("tests.turns.record.MIN_LIMIT_S", limit_s)
    code, results = run(tree, hanging=HANGING.format(mark=mark), good=QUICK.format(wrong=9))
    assert code == 1
    assert {file: result.summary for file, result in last_runs(results).items()} == {
        "test_hanging.py": "hung: no end within 8 s",
        "test_good.py": "2 passed, 1 skipped",
    }
    assert limit_of("test_hanging.py", results) == 2 * limit_s
    assert find_sleepers(mark) == []


@pytest.mark.slow
def test_no_test_begins_once_the_time_is_over(tree: Path) -> None:
    code, results = run(tree, seconds=4, long=HANGING.format(mark="1").replace("600", "5"))
    assert code == 0
    assert [result.summary for result in results] == ["2 passed, 1 due"]
    assert not results[0].has_run


@pytest.mark.slow
def test_what_runs_after_the_end_is_killed_and_is_due(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "GRACE_S", 3.0)
    started = time.monotonic()
    code, results = run(tree, seconds=5, long=HANGING.format(mark="1"))
    assert time.monotonic() - started < NEW_LIMIT_S / 10
    assert code == 0
    assert [result.summary for result in results] == ["1 passed, 1 due"]
