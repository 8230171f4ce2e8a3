"""Ends a process, or all that it has started, when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from execution.forkserver.descendants import adopt_orphans, end_descendants

PARENT_ENVIRONMENT: Final = "KILN_PARENT_PID"

_PR_SET_PDEATHSIG: Final = 1
#: Of the thread that waits for a signal: memory may be limited.
_STACK_BYTES: Final = 256 << 10


def parent_environment() -> dict[str, str]:
    """Variables that a parent adds to the environment of a child that calls `die_with_parent`."""
    return {PARENT_ENVIRONMENT: str(os.getpid())}


def die_with_parent(death_signal: signal.Signals, parent_pid: int | None = None) -> None:
    """Asks the kernel to signal this process when the thread that started it ends; at once if the parent has ended.

    A forked child passes its parent's id; None takes it from the environment.
    """
    _set_death_signal(death_signal)
    if os.getppid() != (int(os.environ[PARENT_ENVIRONMENT]) if parent_pid is None else parent_pid):
        os.kill(os.getpid(), death_signal)


@contextmanager
def outliving_parent(parent_pid: int) -> Iterator[None]:
    """Lets this process, which dies with its parent by SIGKILL, come to the end of the block first."""
    _set_death_signal(0)
    yield
    die_with_parent(signal.SIGKILL, parent_pid)


def _set_death_signal(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_tree_with_parent(parent_pid: int) -> None:
    """Ends this process with all that descends from it when the thread that started it ends.

    A thread waits for SIGTERM, which all others block. A handler would not do: Python runs handlers between its own
    instructions, so one whose signal comes just before a wait for a child runs when that child has ended by itself.
    The process leads its process group.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    usual_bytes = threading.stack_size(_STACK_BYTES)
    threading.Thread(target=_end_tree_at_signal, daemon=True).start()
    threading.stack_size(usual_bytes)
    die_with_parent(signal.SIGTERM, parent_pid)


def _end_tree_at_signal() -> None:
    signal.sigwait([signal.SIGTERM])
    try:
        end_descendants()
    finally:
        # Also where memory or descriptors have run out.
        os.killpg(0, signal.SIGKILL)
