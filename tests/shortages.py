"""Real shortages for the process of a test: its limits are lowered for a moment."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited(kind: int, soft: int, pid: int = 0) -> Iterator[None]:
    """A process, this one by default, has a lower soft limit inside the block."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def open_descriptors(pid: int | None = None) -> set[int]:
    """The descriptors that a process, this one by default, has open, without those of what waits to be collected."""
    if pid is None:
        gc.collect()
    found = {int(path.name) for path in Path(f"/proc/{pid or os.getpid()}/fd").iterdir()}
    if pid is None:
        # The one that listed the directory has been closed.
        found = {fd for fd in found if _is_open(fd)}
    return found


def keeps_descriptors(act: Callable[[], None]) -> bool:
    """Whether a call leaves open what was, and nothing else.

    Threads of libraries that earlier tests have used may open and close descriptors of their own meanwhile. So a call
    that does not seem to is made again: what it leaves open, or closes by mistake, it does every time.
    """
    for _ in range(3):
        before = open_descriptors()
        act()
        if open_descriptors() == before:
            return True
    return False


@contextmanager
def few_descriptors(spare: int = 0, pid: int | None = None) -> Iterator[None]:
    """Inside the block, a process can open `spare` descriptors at most."""
    if pid is None:
        # Otherwise the block may collect what tests before it left, and so get descriptors back.
        gc.collect()
    taken = open_descriptors(pid)
    # A limit bounds the numbers of descriptors, so those that are free below it count, too.
    limit = next(bound for bound in range(1, 1 << 20) if bound - len([fd for fd in taken if fd < bound]) > spare) - 1
    with limited(resource.RLIMIT_NOFILE, limit, pid or 0):
        yield


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
