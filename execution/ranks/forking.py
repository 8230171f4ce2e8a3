"""What a process has to be that others are forked from."""

from __future__ import annotations

from pathlib import Path


def check_single_thread() -> None:
    """Checks that this process can be forked: locks that other threads held would stay locked in the new one.

    Raises:
        RuntimeError: It has several threads.
    """
    num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if num_threads != 1:
        raise RuntimeError(f"a process with {num_threads} threads cannot be forked")
