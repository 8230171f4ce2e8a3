"""Fetches a checkpoint in children that kill themselves, each a few calls later than the one before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from compiler_svc.remote.fetching import fetch_whole
from tests.kill_points import CountedCalls, repeat_until_done

#: What writes: the module itself, and the calls of pathlib that change the disk for it.
CALLS: CountedCalls = {
    "compiler_svc.remote.fetching": None,
    "compiler_svc.remote.room": None,
    "pathlib": {"open", "write", "__exit__", "mkdir", "rename"},
    "shutil": {"rmdir", "unlink"},
}


def main(url: str, key: str, before: Path, *max_bytes: str) -> None:
    """Fetches into copies of `before`, which may hold checkpoints that have to go."""

    def prepare(directory: Path) -> Callable[[], object]:
        return lambda: fetch_whole(url, key, (url,), directory, *map(int, max_bytes))

    repeat_until_done(prepare, before, 1, CALLS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
