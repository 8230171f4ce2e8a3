"""The processes that a test started, apart from services that the whole run shares.

Processes end between two looks at them: what has ended is left out, never an error.
"""

from __future__ import annotations

from contextlib import suppress

import psutil

_others: set[psutil.Process] = set()


def note_others() -> None:
    """Remembers the children that are there before a test begins."""
    _others.clear()
    _others.update(descendants())


def own_children() -> list[psutil.Process]:
    """Children and their children that the test started, including ended ones whose parent has not waited for them."""
    return [child for child in descendants() if child not in _others]


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Children and their children of a process (of this one if `pid` is None); none if it has ended itself."""
    with suppress(psutil.NoSuchProcess):
        return [*psutil.Process(pid).children(recursive=True)]
    return []


def living_descendants(pid: int | None = None) -> list[psutil.Process]:
    """Those of the descendants that have not ended."""
    return [child for child in descendants(pid) if lives(child)]


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended. A zombie has."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def name_of(process: psutil.Process) -> str:
    """A process's name, empty once it is gone."""
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank that lives."""
    return name_of(process).startswith("kiln-rank") and lives(process)
