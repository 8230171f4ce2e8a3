"""Runs a command that is killed when its parent goes: `python tether.py PARENT_PID COMMAND…`.

A `kiln up` that is killed with SIGKILL cannot stop its services, so the kernel does: PR_SET_PDEATHSIG asks for a signal
when the parent ends, and survives the `exec` of the service. It is set here, in the child after the `exec` of this
script, because code between fork and exec of a process with threads can deadlock. Linux only; elsewhere the services
outlive a killed parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def run(parent_pid: int, command: list[str]) -> None:
    """Becomes the command; never returns."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent_pid:  # it went before the signal was asked for
            sys.exit("the parent is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
