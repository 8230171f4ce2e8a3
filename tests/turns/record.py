"""What CI keeps from run to run, in a directory of its own: one JSON line for each run of a file, or flaky test."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

#: Seconds that a file has which has never run whole, and that every file has at least.
NEW_LIMIT_S: Final = 600.0
MIN_LIMIT_S: Final = 60.0
#: What a file may take that has not run yet.
UNKNOWN_S: Final = 120.0


@dataclass(frozen=True)
class FileResult:
    """A run of the slow tests of one file.

    Attributes:
        file: Its path in the repository.
        ended: When, in ISO 8601, UTC.
        commit: What ran.
        seconds: The sum over its tests, or the limit of a file that hung.
        num_due: Tests that the end of the run's time left out.
        failed: Tests that failed, without the file's path.
        has_hung: Whether it was killed at its limit.
    """

    file: str
    ended: str
    commit: str
    seconds: float
    num_passed: int
    num_skipped: int = 0
    num_due: int = 0
    failed: tuple[str, ...] = ()
    has_hung: bool = False

    @property
    def has_run(self) -> bool:
        """Whether each of its tests had its turn."""
        return self.num_due == 0

    @property
    def has_failed(self) -> bool:
        return self.has_hung or bool(self.failed)

    @property
    def summary(self) -> str:
        """As in "3 passed, 1 failed: test_first[a]"."""
        if self.has_hung:
            return f"hung: no end within {self.seconds:.0f} s"
        counts = {"passed": self.num_passed, "skipped": self.num_skipped, "due": self.num_due}
        parts = [f"{number} {outcome}" for outcome, number in counts.items() if number]
        if self.failed:
            parts.append(f"{len(self.failed)} failed: {' '.join(self.failed)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class FlakyTest:
    """A test that failed, and passed alone afterwards; `ended` and `commit` as in `FileResult`."""

    test: str
    ended: str
    commit: str


T = TypeVar("T", FileResult, FlakyTest)


class Record(Generic[T]):
    """An append-only file of results."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        """Takes the file, which need not exist."""
        self.path = path
        self._kind = kind

    def add(self, result: T) -> None:
        """Appends a result, in one write: workers share the file.

        Raises:
            OSError: The file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def read(self) -> list[T]:
        """All results, oldest first: none if the file cannot be read. A line that is no result is ignored."""
        try:
            text = self.path.read_text(errors="replace")
        except OSError:
            return []
        return list(self._parse(text))

    def _parse(self, text: str) -> Iterator[T]:
        for line in text.splitlines():
            try:
                values: dict[str, Any] = json.loads(line)
                lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
                yield self._kind(**values | lists)
            except (ValueError, TypeError, AttributeError):
                continue


def slow_record(directory: Path) -> Record[FileResult]:
    """The results of slow test files."""
    return Record(directory / "slow-tests.jsonl", FileResult)


def flaky_record(directory: Path) -> Record[FlakyTest]:
    """The tests that `make test` failed at, and that passed alone."""
    return Record(directory / "flaky-tests.jsonl", FlakyTest)


def last_runs(results: Iterable[FileResult]) -> dict[str, FileResult]:
    """The last whole run of each file."""
    return {result.file: result for result in results if result.has_run}


def limit_of(file: str, results: Iterable[FileResult]) -> float:
    """Seconds that a file may take: by its longest run, and twice as long as when it hung."""
    runs = [result for result in results if result.file == file and result.has_run]
    if not runs:
        return NEW_LIMIT_S
    return max(MIN_LIMIT_S, *(2 * run.seconds if run.has_hung else 1.5 * run.seconds for run in runs))


def expect_seconds(file: str, results: Iterable[FileResult]) -> float:
    """What a file will take: as long as the last time; twice as long as it ran in vain if it has never ended."""
    runs = [result for result in results if result.file == file]
    ended = [run.seconds for run in runs if run.has_run and not run.has_hung]
    return ended[-1] if ended else 2 * max((run.seconds for run in runs), default=UNKNOWN_S / 2)


def find_state() -> Path:
    """The directory that CI keeps; a temporary one if it cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get("KILN_CI_STATE") or cache / "kiln/ci")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "written").touch()
    except OSError as error:
        directory = Path(tempfile.mkdtemp(prefix="kiln-ci-"))
        sys.stdout.write(f"Results are not kept: {error}\n")
    return directory
