"""Ending a process when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

PARENT_ENVIRONMENT: Final = "KILN_PARENT_PID"

_PR_SET_PDEATHSIG: Final = 1


def parent_environment() -> dict[str, str]:
    """What a parent adds to the environment of a child that calls `die_with_parent`."""
    return {PARENT_ENVIRONMENT: str(os.getpid())}


def die_with_parent(death_signal: signal.Signals) -> None:
    """Asks the kernel to signal this process when the thread that started it ends.

    A parent that has ended before this call is noticed too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != int(os.environ[PARENT_ENVIRONMENT]):
        os.kill(os.getpid(), death_signal)
