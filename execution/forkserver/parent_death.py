"""Ends a process when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

PARENT_ENVIRONMENT: Final = "KILN_PARENT_PID"

_PR_SET_PDEATHSIG: Final = 1


def parent_environment() -> dict[str, str]:
    """Variables that a parent adds to the environment of a child that calls `die_with_parent`."""
    return {PARENT_ENVIRONMENT: str(os.getpid())}


def die_with_parent(death_signal: signal.Signals, parent_pid: int | None = None) -> None:
    """Asks the kernel to signal this process when the thread that started it ends.

    Signals it at once if the parent has ended already.

    Args:
        parent_pid: Process id of the parent. None takes it from the environment; a forked child passes it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != (int(os.environ[PARENT_ENVIRONMENT]) if parent_pid is None else parent_pid):
        os.kill(os.getpid(), death_signal)
