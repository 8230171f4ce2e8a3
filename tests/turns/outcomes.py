"""A pytest plugin (`-p tests.turns.outcomes --outcomes=FILE`): writes what became of each test that was collected.

With workers, the process that leads them writes the file; what a worker took along when it died is there, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcomes:
    """What a run came to.

    Attributes:
        exit_code: pytest's own.
        failed: Tests that failed at least once, in set-up and teardown too, and those whose worker died.
        unrun: Tests that were collected and neither failed nor came to their end.
        uncollected: Files that pytest could not collect.
    """

    exit_code: int
    failed: Sequence[str]
    unrun: Sequence[str]
    uncollected: Sequence[str]

    @classmethod
    def read(cls, path: Path) -> Outcomes | None:
        """None if pytest did not come to its end, or never began."""
        return cls(**json.loads(path.read_text())) if path.exists() else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("turns").addoption("--outcomes", type=Path, required=True, help="file that gets the outcomes")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeWriter(config.getoption("--outcomes")))


class OutcomeWriter:
    """Notes reports as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._collected: dict[str, None] = {}
        self._ended: set[str] = set()
        self._failed: dict[str, None] = {}
        self._uncollected: dict[str, None] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(dict.fromkeys(item.nodeid for item in session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        self._collected.update(dict.fromkeys(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._uncollected[report.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None
        elif report.when == "teardown":
            self._ended.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        unrun = [test for test in self._collected if test not in self._ended and test not in self._failed]
        outcomes = Outcomes(int(exitstatus), [*self._failed], unrun, [*self._uncollected])
        self._path.write_text(json.dumps(asdict(outcomes)))
