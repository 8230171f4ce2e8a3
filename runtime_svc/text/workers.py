"""Threads that turn text into tokens and back, with a bound on what may wait for them.

They are not the threads that hash and fetch bundles: a prompt never waits for a gigabyte.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from runtime_svc.errors import QueueFull

MAX_THREADS: Final = 4
#: Text that may be at work or wait, in characters; a token id counts as one.
CAPACITY_CHARS: Final = 64 << 20
# The least that a call counts, so that their number is bounded too.
MIN_CALL_CHARS: Final = 4096
RETRY_AFTER_S: Final = 1.0

P = ParamSpec("P")
R = TypeVar("R")


class TextWorkers:
    """A bounded pool. One call is always taken, however long its text."""

    def __init__(self, capacity_chars: int = CAPACITY_CHARS) -> None:
        """Starts idle."""
        self._capacity_chars = capacity_chars
        self._pending_chars = 0
        self._num_pending = 0
        num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(self, num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function of so much text in a thread.

        Raises:
            QueueFull: Too much text waits.
        """
        cost = max(num_chars, MIN_CALL_CHARS)
        if self._num_pending and self._pending_chars + cost > self._capacity_chars:
            raise QueueFull(self._num_pending, RETRY_AFTER_S)
        self._pending_chars += cost
        self._num_pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        # A caller that gives up does not stop its thread.
        work.add_done_callback(lambda _: self._release(cost))
        return await asyncio.shield(work)

    def close(self) -> None:
        """Takes no more calls; those that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, cost: int) -> None:
        self._pending_chars -= cost
        self._num_pending -= 1
