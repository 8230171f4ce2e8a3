"""Repeats an action in children, each of which kills itself some calls later than the one before."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from tests.repository import ROOT

#: Calls into C that are counted: the functions of each module by name, or all of them (None).
CountedCalls = Mapping[str, Collection[str] | None]

#: What writes to a layout: the modules themselves, and the calls of pathlib that change the disk for them.
LAYOUT_CALLS: Final[CountedCalls] = {
    "bundle.store.blob_writer": None,
    "bundle.store.layout": None,
    "pathlib": {"open", "write", "__exit__", "rename", "replace", "unlink"},
}


def repeat(module: str, before: Path, *words: str | Path, step: int = 1) -> list[Path]:
    """Repeats what a module says in a process of its own; returns the children's directories, the last one of a child
    that came to its end.

    Args:
        module: It has `CALLS`, which are counted in any thread, and `prepare`, which takes the words and returns a
            function of a child's directory; what that returns, the child does.
        before: The directory that every child begins with a copy of. That of child N is beside it, named N, and the
            child is killed before its counted call N.
        step: By how much N goes up.
    """
    command = [sys.executable, "-m", "tests.kill_points", module, str(before), str(step), *map(str, words)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    return [before.with_name(str(number)) for number in range(0, int(result.stdout) + 1, step)]


def _repeat_until_done(
    prepare: Callable[[Path], Callable[[], Any]], before: Path, step: int, calls: CountedCalls
) -> NoReturn:
    """Forks child after child until one comes to its end, prints its number, and exits as that child did."""
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


if __name__ == "__main__":
    driver = importlib.import_module(sys.argv[1])
    _repeat_until_done(driver.prepare(*sys.argv[4:]), Path(sys.argv[2]), int(sys.argv[3]), driver.CALLS)
