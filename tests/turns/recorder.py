"""A pytest plugin (`-p tests.turns.recorder`): begins no test once the time is over, and records what files came to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.turns.record import FileResult, Record

OUTCOMES = pytest.StashKey["Outcomes"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("turns")
    group.addoption("--turns-record", type=Path, required=True, help="file that gets a line for each test file")
    group.addoption("--turns-commit", default="", help="commit that the lines name")
    group.addoption("--turns-end", type=float, default=float("inf"), help="seconds since 1970; no test begins later")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    outcomes = item.session.stash.setdefault(OUTCOMES, Outcomes(item.path))
    is_last = nextitem is None or nextitem.path != item.path
    try:
        return (yield)
    except KeyboardInterrupt:
        outcomes.num["due"] += 1
        is_last = True
        raise
    finally:
        if is_last:
            outcomes.write(item.config)
            del item.session.stash[OUTCOMES]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() >= item.config.getoption("--turns-end"):
        # The report will count it among the skipped.
        item.session.stash[OUTCOMES].num.update(due=1, skipped=-1)
        pytest.skip("due: the time of this run was over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.session.stash[OUTCOMES].add(report)
    return report


class Outcomes:
    """What the tests of the file that runs have come to so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds = 0.0
        self._failed: dict[str, None] = {}
        self.num = Counter[str]()

    def add(self, report: pytest.TestReport) -> None:
        """Counts a phase of a test."""
        self._seconds += report.duration
        if report.failed:
            self._failed[report.nodeid.partition("::")[2]] = None
        elif report.skipped or report.when == "call":
            self.num[report.outcome] += 1

    def write(self, config: pytest.Config) -> None:
        """Appends a line to the record."""
        result = FileResult(
            file=self._path.relative_to(config.rootpath).as_posix(),
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=config.getoption("--turns-commit"),
            seconds=round(self._seconds, 1),
            num_passed=self.num["passed"],
            num_skipped=self.num["skipped"],
            num_due=self.num["due"],
            failed=tuple(self._failed),
        )
        Record(config.getoption("--turns-record"), FileResult).add(result)
