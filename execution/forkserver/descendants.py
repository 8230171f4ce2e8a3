"""Ends what a process has started, in whatever session or process group it runs.

A process that dies leaves its children to the nearest process above it that adopts orphans, or else to the first one of
the host. So nothing escapes from a process that adopts, as long as that lives. A kernel without CONFIG_PROC_CHILDREN
does not list children; then only process groups end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Makes this process, but not what it forks, adopt those of its descendants whose own parents have died."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(spared: Collection[int] = ()) -> None:
    """Kills and reaps this process's children, and what it adopts of theirs, until only those spared are left.

    Nothing else in this process may wait for its children meanwhile.
    """
    while ended := [pid for pid in _list_children(os.getpid()) if pid not in spared]:
        for pid in ended:
            # Parents last: if this process dies meanwhile, those that end with it still end what they have started.
            for one in reversed((pid, *_stop_descendants(pid))):
                _signal(one, signal.SIGKILL)
        for pid in ended:
            os.waitpid(pid, 0)


def end_descendants() -> None:
    """Kills what descends from this process, which adopts orphans, except for the members of its own process group.

    Those are stopped only, for the caller to kill together with itself.
    """
    stopped = _stop_descendants(os.getpid())
    own_group = os.getpgrp()
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != own_group:
                os.kill(pid, signal.SIGKILL)


def _stop_descendants(pid: int) -> list[int]:
    """Stops what descends from a process, before any of it is killed; returns it, parents before their children.

    So none starts another process any more, and none goes on because another one has ended: neither a shell with its
    next command, nor a thread of this process, which might make an end of this process too early.
    """
    stopped: list[int] = []
    while found := [one for one in find_descendants(pid) if one not in stopped]:
        for one in found:
            _signal(one, signal.SIGSTOP)
        stopped += found
    return stopped


def find_descendants(pid: int) -> list[int]:
    """Finds a process's children, their children, and so on, including those that have ended and wait to be reaped."""
    found = [pid]
    for one in found:
        found += _list_children(one)
    return found[1:]


def _list_children(pid: int) -> list[int]:
    children: list[int] = []
    # The process, or a thread of it, may have ended.
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children


def _signal(pid: int, number: signal.Signals) -> None:
    # It may have ended.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
