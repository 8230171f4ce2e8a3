"""`python -m tests.turns.reaper SECONDS COMMAND …`: runs a command for so long, and kills all that it leaves.

What the command started may lead sessions of its own, and outlive its parents: on Linux it is then this process's
child. Gives the command's exit code, or LATE if the time was over; the command is interrupted first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Final

import psutil

LATE: Final = 124
#: Seconds from the interrupt to the kill, in which a test run says what it was doing.
LEAVE_S: Final = 15.0
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.05


def main() -> int:
    """Gives the exit code."""
    end_s = time.monotonic() + float(sys.argv[1])
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel cannot give orphans to this process")
    process = subprocess.Popen(sys.argv[2:], start_new_session=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = wait(process.pid, end_s)
        if code is None:
            os.kill(process.pid, signal.SIGINT)
            wait(process.pid, time.monotonic() + LEAVE_S)
            code = LATE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    kill_all()
    return code


def wait(pid: int, end_s: float) -> int | None:
    """Buries children until one of them has ended, whose exit code it gives; None if the time is over before."""
    while time.monotonic() < end_s:
        buried, status = os.waitpid(-1, os.WNOHANG)
        if buried == pid:
            return os.waitstatus_to_exitcode(status)
        if buried == 0:
            time.sleep(_POLL_S)
    return None


def kill_all() -> None:
    """Kills children and theirs until none is left: one that dies leaves its own to us."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.waitpid(-1, 0)


if __name__ == "__main__":
    sys.exit(main())
