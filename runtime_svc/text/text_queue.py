"""Where text waits: for the text process of a deployment, or for the threads of all deployments.

Threads check and convert large requests. Other threads hash and fetch bundles, so a prompt never waits for a large
blob. What tokenizers and chat templates do takes no thread, but the text process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

import structlog

from execution.text.control import Work
from execution.text.errors import TextLimitExceeded, TextProcessLost
from execution.text.handle import AnswerT, TextProcess
from runtime_svc.errors import DeploymentNotReady, QueueFull

#: Bound on the text, in characters; a token id counts as one.
CAPACITY_CHARS: Final = 16 << 20
# Every call counts at least this much, so that the number of calls is bounded too.
MIN_CALL_CHARS: Final = 4096
RETRY_AFTER_S: Final = 1.0

MAX_THREADS: Final = 4
#: What is at most this large takes a few milliseconds, and is not worth a thread.
MAX_INLINE_CHARS: Final = 64 << 10
#: A call whose caller has left may go on for as long, because a new process costs more than the rest of most calls.
DROP_AFTER_S: Final = 1.0
#: How often a call is begun: a process that ended by itself may have been killed for no fault of the call.
_MAX_ATTEMPTS: Final = 2

P = ParamSpec("P")
R = TypeVar("R")

_log = structlog.get_logger("text")


class Backlog:
    """The text of the calls that have not ended. An empty backlog takes any call, even one beyond the bound."""

    def __init__(self, capacity_chars: int = CAPACITY_CHARS) -> None:
        self._capacity_chars = capacity_chars
        self._pending_chars = 0
        self.num_pending = 0

    def take(self, num_chars: int) -> Callable[[], None]:
        """Takes a call that works on that much text; returns what to call once it has ended."""
        cost = max(num_chars, MIN_CALL_CHARS)
        if self.num_pending and self._pending_chars + cost > self._capacity_chars:
            raise QueueFull(self.num_pending, RETRY_AFTER_S)
        self._pending_chars += cost
        self.num_pending += 1

        def release() -> None:
            self._pending_chars -= cost
            self.num_pending -= 1

        return release


class TextWorkers:
    """A pool of threads with a bound. An idle pool takes any call, even if its text exceeds the bound."""

    def __init__(self, backlog: Backlog | None = None) -> None:
        self._backlog = backlog or Backlog()
        num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(self, num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function in a thread; `num_chars` is the amount of text that it works on."""
        release = self._backlog.take(num_chars)
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        # A cancelled caller does not stop its thread, so the text counts until the thread is done.
        work.add_done_callback(lambda _: release())
        return await asyncio.shield(work)

    async def run_if_large(self, num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function at once if it works on little text, else in a thread; see `run`."""
        if num_chars <= MAX_INLINE_CHARS:
            return function(*args, **kwargs)
        return await self.run(num_chars, function, *args, **kwargs)

    def close(self) -> None:
        """Takes no more calls, and drops those that wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class TextQueue:
    """Passes one call after another to the text process of a deployment.

    A call that reaches a limit takes its process with it, and fails alone: those behind it have not been sent yet, and
    get a new process.
    """

    def __init__(
        self,
        deployment_id: str,
        process: TextProcess,
        start: Callable[[], Awaitable[TextProcess]],
        backlog: Backlog | None = None,
    ) -> None:
        """Takes over a process."""
        #: How often a process that had ended was replaced.
        self.num_restarts = 0
        self._deployment_id = deployment_id
        self._process = process
        self._start = start
        self._backlog = backlog or Backlog()
        self._turn = asyncio.Lock()
        self._running: asyncio.Task[object] | None = None
        self._dropped: set[asyncio.Task[object]] = set()
        self._is_closed = False

    async def run(self, num_chars: int | None, call: Work, answer_type: type[AnswerT], work: str) -> AnswerT:
        """Makes a call and returns its answer; `num_chars` is None for a call that the bound does not concern.

        A call whose caller is cancelled is dropped: at once if it waits, soon if it has begun.
        """
        release = None if num_chars is None else self._backlog.take(num_chars)
        task = asyncio.create_task(self._run(call, answer_type, work))
        if release is not None:
            task.add_done_callback(lambda _: release())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._drop(task)
            raise

    async def close(self) -> None:
        """Ends the process; calls that have not ended fail."""
        self._is_closed = True
        await self._process.close()

    async def _run(self, call: Work, answer_type: type[AnswerT], work: str) -> AnswerT:
        async with self._turn:
            task = asyncio.current_task()
            assert task is not None
            self._running = task
            try:
                return await self._attempt(call, answer_type, work)
            finally:
                self._running = None
                self._dropped.discard(task)

    async def _attempt(self, call: Work, answer_type: type[AnswerT], work: str) -> AnswerT:
        attempt = 1
        while True:
            process = await self._provide()
            if self._running in self._dropped:
                raise TextProcessLost(work, "its caller has left")
            try:
                return await process.call(call, answer_type, work)
            except TextLimitExceeded as error:
                _log.warning("text process killed", deployment_id=self._deployment_id, error=str(error))
                raise
            except TextProcessLost as error:
                if self._running in self._dropped:
                    raise
                _log.warning("text process lost", deployment_id=self._deployment_id, error=str(error))
                if attempt == _MAX_ATTEMPTS:
                    raise
                attempt += 1

    async def _provide(self) -> TextProcess:
        if self._is_closed:
            raise DeploymentNotReady(self._deployment_id, "UNLOADING")
        if self._process.has_ended:
            self._process = await self._start()
            self.num_restarts += 1
            if self._is_closed:
                await self._process.close()
                raise DeploymentNotReady(self._deployment_id, "UNLOADING")
        return self._process

    def _drop(self, task: asyncio.Task[AnswerT]) -> None:
        """Ends a call whose caller has left."""
        # Marks its error as retrieved.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if task is not self._running:
            task.cancel()
            return
        self._dropped.add(task)
        asyncio.get_running_loop().call_later(DROP_AFTER_S, self._kill_dropped, task)

    def _kill_dropped(self, task: asyncio.Task[object]) -> None:
        if task is self._running and task in self._dropped:
            _log.warning("text process killed", deployment_id=self._deployment_id, error="its caller has left")
            self._process.kill()
