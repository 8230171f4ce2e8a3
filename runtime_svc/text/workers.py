"""Threads that check and convert large requests, with a bound on the text that may wait for them.

Other threads hash and fetch bundles, so a prompt never waits for a large blob. What tokenizers and chat templates do
takes no thread: see `text_queue`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from runtime_svc.text.backlog import Backlog

MAX_THREADS: Final = 4
#: What is at most this large takes a few milliseconds, and is not worth a thread.
MAX_INLINE_CHARS: Final = 64 << 10

P = ParamSpec("P")
R = TypeVar("R")


class TextWorkers:
    """A pool of threads with a bound. An idle pool takes any call, even if its text exceeds the bound."""

    def __init__(self, backlog: Backlog | None = None) -> None:
        """Makes the pool; its threads start with the first calls."""
        self._backlog = backlog or Backlog()
        num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(self, num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function in a thread; `num_chars` is the amount of text that it works on.

        Raises:
            QueueFull: The text at work and this call exceed the bound.
        """
        release = self._backlog.take(num_chars)
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        # A cancelled caller does not stop its thread, so the text counts until the thread is done.
        work.add_done_callback(lambda _: release())
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
