"""What every Python of a compiler imports at its start: it stands still where `tests.servers.halt` says."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path(os.environ["PYTHON_TEST_HALT"])
_WRITES: Final = os.O_WRONLY | os.O_RDWR
#: Which argument of an audit event says what it is of.
_ARGUMENTS: Final = {"open": 0, "os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.listdir": 0, "os.putenv": 0}
_looking: Final = threading.local()
#: No thread of this process does anything with a file between the look of another one and its stop.
_turn = threading.Lock()


def _halt(event: str, arguments: tuple[Any, ...]) -> None:
    # What it does itself are events, too.
    if event not in _ARGUMENTS or getattr(_looking, "is_so", False):
        return
    _looking.is_so = True
    try:
        with _turn:
            if _is_ordered(event, arguments):
                (_FOLDER / "order").unlink()
                (_FOLDER / "halted").symlink_to(str(os.getpid()))
                # Of a signal to the process, this thread might know only when it has gone on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    except OSError:
        # There is no order, or none any more.
        pass
    finally:
        _looking.is_so = False


def _is_ordered(event: str, arguments: tuple[Any, ...]) -> bool:
    ordinal, pattern = str((_FOLDER / "order").readlink()).split(" ", 1)
    does = event.removeprefix("os.")
    if event == "open":
        does = "write" if arguments[2] & _WRITES else "read"
    name = Path("/proc/self/comm").read_text().rstrip()
    return re.search(pattern, f"{name} {does} {arguments[_ARGUMENTS[event]]}") is not None and _number() == int(ordinal)


def _number() -> int:
    """How many events the order has met, in whatever process: a directory is made once."""
    for number in count(1):
        try:
            (_FOLDER / str(number)).mkdir()
        except FileExistsError:
            continue
        return number
    raise AssertionError


def _begin_turns() -> None:
    """A thread that a forked process does not have may have held the lock."""
    global _turn  # noqa: PLW0603 - a lock cannot be taken back from another thread
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_begin_turns)
sys.addaudithook(_halt)
