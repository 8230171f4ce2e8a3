"""Threads that turn text into tokens and back, with a bound on the text that may wait for them.

Other threads hash and fetch bundles, so a prompt never waits for a large blob.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from runtime_svc.errors import QueueFull

MAX_THREADS: Final = 4
#: Bound on the text that threads work on or that waits, in characters; a token id counts as one.
CAPACITY_CHARS: Final = 16 << 20
#: What is at most this large takes a few milliseconds, and is not worth a thread.
MAX_INLINE_CHARS: Final = 64 << 10
# Every call counts at least this much, so that the number of calls is bounded too.
MIN_CALL_CHARS: Final = 4096
RETRY_AFTER_S: Final = 1.0

P = ParamSpec("P")
R = TypeVar("R")


class TextWorkers:
    """A pool of threads with a bound. An idle pool takes any call, even if its text exceeds the bound."""

    def __init__(self, capacity_chars: int = CAPACITY_CHARS) -> None:
        """Makes the pool; its threads start with the first calls."""
        self._capacity_chars = capacity_chars
        self._pending_chars = 0
        self._num_pending = 0
        num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(self, num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function in a thread; `num_chars` is the amount of text that it works on.

        Raises:
            QueueFull: The text at work and this call exceed the bound.
        """
        cost = max(num_chars, MIN_CALL_CHARS)
        if self._num_pending and self._pending_chars + cost > self._capacity_chars:
            raise QueueFull(self._num_pending, RETRY_AFTER_S)
        self._pending_chars += cost
        self._num_pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        # A cancelled caller does not stop its thread, so the text counts until the thread is done.
        work.add_done_callback(lambda _: self._release(cost))
        return await asyncio.shield(work)

    async def run_if_large(self, num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function at once if it works on little text, else in a thread; see `run`.

        Raises:
            QueueFull: See `run`.
        """
        if num_chars <= MAX_INLINE_CHARS:
            return function(*args, **kwargs)
        return await self.run(num_chars, function, *args, **kwargs)

    def close(self) -> None:
        """Takes no more calls, and drops those that wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, cost: int) -> None:
        self._pending_chars -= cost
        self._num_pending -= 1
