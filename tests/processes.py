"""The processes that a test started, apart from services that the whole run shares."""

from __future__ import annotations

import psutil

_others: set[psutil.Process] = set()


def note_others() -> None:
    """Remembers the children that are there before a test begins."""
    _others.clear()
    _others.update(psutil.Process().children(recursive=True))


def own_children() -> list[psutil.Process]:
    """Children and their children that were started since."""
    return [child for child in psutil.Process().children(recursive=True) if child not in _others]
