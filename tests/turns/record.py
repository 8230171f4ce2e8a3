"""What slow test files came to when they last ran: one JSON line for each run of a file, in a place that CI keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileResult:
    """A run of the slow tests of one file.

    Attributes:
        file: Its path in the repository.
        ended: When, in ISO 8601, UTC.
        commit: What ran.
        seconds: The sum over its tests.
        num_due: Tests that the end of the run's time left out.
        failed: Tests that failed, without the file's path.
    """

    file: str
    ended: str
    commit: str
    seconds: float
    num_passed: int
    num_skipped: int = 0
    num_due: int = 0
    failed: tuple[str, ...] = ()

    @property
    def has_run(self) -> bool:
        """Whether each of its tests had its turn."""
        return self.num_due == 0

    @property
    def summary(self) -> str:
        """As in "3 passed, 1 failed: test_first[a]"."""
        counts = {"passed": self.num_passed, "skipped": self.num_skipped, "due": self.num_due}
        parts = [f"{number} {outcome}" for outcome, number in counts.items() if number]
        if self.failed:
            parts.append(f"{len(self.failed)} failed: {' '.join(self.failed)}")
        return ", ".join(parts)


class TurnRecord:
    """An append-only file of results."""

    def __init__(self, path: Path) -> None:
        """Takes the file, which need not exist."""
        self._path = path

    def add(self, result: FileResult) -> None:
        """Appends a result, in one write: workers share the file.

        Raises:
            OSError: The file cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def read(self) -> list[FileResult]:
        """All results, oldest first: none if the file cannot be read. A line that is no result is ignored."""
        try:
            text = self._path.read_text(errors="replace")
        except OSError:
            return []
        return list(_parse(text))

    def last_runs(self) -> dict[str, FileResult]:
        """The last whole run of each file."""
        return {result.file: result for result in self.read() if result.has_run}


def _parse(text: str) -> Iterator[FileResult]:
    for line in text.splitlines():
        try:
            values = json.loads(line)
            yield FileResult(**values | {"failed": tuple(values["failed"])})
        except (ValueError, TypeError, KeyError):
            continue
