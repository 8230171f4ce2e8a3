"""Repeats an action in children, each of which kills itself some calls later than the one before."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

#: Calls into C that are counted: the functions of each module by name, or all of them (None).
CountedCalls = Mapping[str, Collection[str] | None]

#: What writes to a layout: the modules themselves, and the calls of pathlib that change the disk for them.
LAYOUT_CALLS: Final[CountedCalls] = {
    "bundle.blob_writer": None,
    "bundle.layout": None,
    "pathlib": {"open", "write", "__exit__", "rename", "replace", "unlink"},
}


def repeat_until_done(
    prepare: Callable[[Path], Callable[[], Any]], before: Path, step: int, calls: CountedCalls
) -> NoReturn:
    """Forks child after child until one comes to its end, prints its number, and exits as that child did.

    Child N works in a copy of `before` beside it, named N, and is killed before its counted call N.

    Args:
        prepare: Takes the copy; returns what the child does.
        before: The directory that every child begins with.
        step: By how much N goes up.
        calls: What is counted, in any thread.
    """
    # The kernel keeps what a killed process wrote; waiting for the disk hundreds of times proves nothing.
    os.fsync = abs  # in C, so that its calls count
    number = 0
    while True:
        copy = before.with_name(str(number))
        shutil.copytree(before, copy)
        act = prepare(copy)
        child = os.fork()
        if child == 0:
            _kill_before(number, calls)
            act()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code != -signal.SIGKILL:
            sys.stdout.write(f"{number}\n")
            sys.exit(exit_code)
        number += step


def _kill_before(number: int, calls: CountedCalls) -> None:
    """Makes this process kill itself before its counted call of that number."""
    remaining = number

    def count(frame: FrameType, event: str, function: object) -> None:
        nonlocal remaining
        if event != "c_call":
            return
        module = frame.f_globals.get("__name__", "")
        if module not in calls:
            return
        names = calls[module]
        if names is None or getattr(function, "__name__", "") in names:
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)
