"""Runs a command that the kernel kills when its parent ends: `python tether.py PARENT_PID COMMAND…`.

If `kiln up` is killed with SIGKILL, it cannot stop its services, so the kernel does: PR_SET_PDEATHSIG asks for a signal
when the parent ends, and survives the `exec` of the service. This script sets it after its own `exec`, because code
between fork and exec of a process with threads can deadlock. Linux only; on other systems the services outlive a
killed parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def run(parent_pid: int, command: list[str]) -> None:
    """Replaces this process with the command; never returns."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent_pid:  # the parent ended before the signal was set
            sys.exit("the parent is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
