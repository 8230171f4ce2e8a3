"""`.ci/run` on a tree of toy tests: what lands, what does not, and what it says of tests that fail now and then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.turns.gate import MAX_FAILED
from tests.turns.record import FileResult, FlakyTest, flaky_record, slow_record

SETTINGS = """[pytest]
addopts = -p no:asyncio -p no:anyio -p no:hypothesispytest
markers = slow: minutes of work
"""
MAKEFILE = """
setup:
test:
\ttest ! -e lint-fails
\t{python} -m pytest -m "not slow" -n 1 --max-worker-restart 1 -p tests.turns.outcomes --outcomes $(OUTCOMES)
"""
#: Fails, or ends its worker, as often as the number in a file says.
FAILING = """
import os
from pathlib import Path

def test_first():
    pass

def test_second():
    left = Path({path!r})
    number = int(left.read_text())
    left.write_text(str(number - 1))
    if number > 0:
        {act}

def test_third():
    assert os.environ["KILN_FUZZ_SEED"] == "1"
"""
SLOW = """
import pytest

@pytest.mark.slow
def test_slow():
    assert {is_true}
"""


@dataclass(frozen=True)
class Outcome:
    """How `.ci/run` ended: its exit code, the last line, all of them, and what it recorded."""

    code: int
    last: str
    text: str
    flaky: list[FlakyTest]
    slow: list[FileResult]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose tests pass, without a matrix."""
    tree = tmp_path / "tree"
    for name in (".ci", "deploy"):
        (tree / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", tree / ".ci/run")
    (tree / ".venv").symlink_to(sys.prefix)
    (tree / "deploy/test-packages.txt").write_text("")
    (tree / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (tree / "pytest.ini").write_text(SETTINGS)
    (tree / "test_good.py").write_text("def test_good(): pass\n")
    git = ("git", "-c", "user.name=a", "-c", "user.email=b")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "toys")):
        subprocess.run([*git, *command], cwd=tree, check=True)
    return tree


def write_failing(tree: Path, times: int, act: str) -> None:
    """Adds a test that fails a number of times, between two others."""
    path = tree / "left"
    path.write_text(str(times))
    (tree / "test_failing.py").write_text(FAILING.format(path=str(path), act=act))


def run(tree: Path) -> Outcome:
    state = tree / "state"
    environment = os.environ | {"KILN_CI_STATE": str(state), "PYTHONPATH": str(ROOT)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    result = subprocess.run([tree / ".ci/run"], env=environment, timeout=240, check=False, **output)
    last = result.stdout.splitlines()[-1]
    return Outcome(result.returncode, last, result.stdout, flaky_record(state).read(), slow_record(state).read())


def test_what_passes_lands_and_slow_tests_report(tree: Path) -> None:
    (tree / "test_slow.py").write_text(SLOW.format(is_true=False))
    earlier = FileResult("test_slow.py", "2026-11-01T04:00:00+00:00", "abc", 1.0, 1)
    slow_record(tree / "state").add(earlier)
    outcome = run(tree)
    assert (outcome.code, outcome.last) == (0, "lands: make test passed"), outcome.text
    assert [result.failed for result in outcome.slow] == [(), ("test_slow",)]
    assert outcome.flaky == []


@pytest.mark.parametrize("act", ["raise AssertionError", pytest.param("os._exit(3)", marks=pytest.mark.slow)])
def test_what_fails_every_second_time_lands_and_is_named(tree: Path, act: str) -> None:
    write_failing(tree, 1, act)
    outcome = run(tree)
    assert (outcome.code, outcome.last) == (0, "lands: make test passed but for 1 tests, which passed alone"), (
        outcome.text
    )
    assert "flaky: test_failing.py::test_second" in outcome.text.splitlines()
    assert [flaky.test for flaky in outcome.flaky] == ["test_failing.py::test_second"]
    assert "1 passed in" in outcome.text, "the second run has this test alone"


def test_what_fails_always_stays(tree: Path) -> None:
    write_failing(tree, 2, "raise AssertionError")
    outcome = run(tree)
    assert (outcome.code, outcome.last) == (1, "does not land: alone, too, failed test_failing.py::test_second")
    assert (outcome.flaky, outcome.slow) == ([], [])


def test_a_worker_that_dies_always_stays(tree: Path) -> None:
    write_failing(tree, 99, "os._exit(3)")
    outcome = run(tree)
    assert outcome.code == 1
    assert re.fullmatch(r"does not land: .*test_failing.py::test_second.*", outcome.last), outcome.text


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"lint-fails": ""}, "make test ended with exit code 2, and no test had run to its end"),
        ({"test_broken.py": "import nothing_of_this_name\n"}, "pytest could not collect test_broken.py"),
        pytest.param(
            {"test_bad.py": "".join(f"def test_{number}(): assert False\n" for number in range(MAX_FAILED + 1))},
            f"{MAX_FAILED + 1} tests failed",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lint", "import", "too many"],
)
def test_what_is_broken_gets_no_second_run(tree: Path, broken: dict[str, str], reason: str) -> None:
    for name, text in broken.items():
        (tree / name).write_text(text)
    outcome = run(tree)
    assert (outcome.code, outcome.last) == (1, f"does not land: {reason}"), outcome.text
    assert outcome.text.count("test session starts") == (0 if "lint-fails" in broken else 1)
