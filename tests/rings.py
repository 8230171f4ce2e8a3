"""Rings: what tests start, from nothing at all to a whole stack.

The folder of a test says its ring, so that `make check` can run those that start nothing, and a run can say how long
each ring took, beside what it may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.repository import ROOT


@dataclass(frozen=True)
class Ring:
    """A folder of `tests/`.

    Attributes:
        starts: What its tests start.
        minutes: What they may take in `make test`, of all workers together; None if they are not in it.
    """

    starts: str
    minutes: int | None


#: By folder. A run begins with those that take longest, so that no long file is left for the end.
RINGS: Final = {
    "device": Ring("devices and versions of torch that `.venv` does not have; not in `make test`", None),
    "parity": Ring("both services, and transformers beside them: a covering array of families, degrees and levels", 3),
    "system": Ring("both services as a user starts them, images, other clients; kills processes", 10),
    "service": Ring("servers on loopback, ranks, builds, commands: the processes of one service at most", 16),
    "contract": Ring("what the implementations of a protocol need, each in one suite", 4),
    "unit": Ring("nothing; a unit test fails if it starts a process or a server", 4),
    "architecture": Ring("git, and Python for a look at what is imported", 1),
}


def render_rows() -> list[str]:
    """The rows of the table in CONTRIBUTING.md, which begins with what starts least."""
    return [f"| `tests/{name}/` | {ring.starts} | {ring.minutes or '–'} |" for name, ring in reversed(RINGS.items())]


def list_times(seconds: dict[str, float], num_tests: dict[str, int]) -> Iterator[str]:
    """A line for each ring that has run: its tests, its seconds, and what it may take."""
    for name, ring in RINGS.items():
        if name in seconds:
            budget = "" if ring.minutes is None else f" of {60 * ring.minutes}"
            yield f"{name:<12} {num_tests[name]:5} tests {seconds[name]:7.1f} s{budget}"


@cache
def ring_of(path: Path | str) -> str:
    """The ring of a test file, by its path in the repository or on the disk. A run asks for each of its tests.

    Raises:
        ValueError: The file is in no ring.
    """
    parts = (ROOT / path).relative_to(ROOT / "tests").parts
    if parts[0] not in RINGS:
        raise ValueError(f"{path} is in none of the folders {', '.join(RINGS)} of tests/")
    return parts[0]
