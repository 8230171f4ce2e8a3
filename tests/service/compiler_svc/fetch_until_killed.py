"""A fetch of a checkpoint in children that kill themselves; see `tests.kill_points`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compiler_svc.remote.fetching import fetch_whole
from tests.kill_points import CountedCalls

#: What writes: the module itself, and the calls of pathlib that change the disk for it.
CALLS: CountedCalls = {
    "compiler_svc.remote.fetching": None,
    "compiler_svc.remote.room": None,
    "pathlib": {"open", "write", "__exit__", "mkdir", "rename"},
    "shutil": {"rmdir", "unlink"},
}


def prepare(url: str, key: str, *max_bytes: str) -> Callable[[Path], Callable[[], object]]:
    """Fetches into a directory, which may hold checkpoints that have to go."""
    return lambda directory: lambda: fetch_whole(url, key, (url,), directory, *map(int, max_bytes))
