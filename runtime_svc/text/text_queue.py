"""The queue in front of the text process of a deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from execution.text.control import Work
from execution.text.errors import TextLimitExceeded, TextProcessLost
from execution.text.handle import AnswerT, TextProcess
from runtime_svc.errors import DeploymentNotReady
from runtime_svc.text.backlog import Backlog

#: A call whose caller has left may go on for as long, because a new process costs more than the rest of most calls.
DROP_AFTER_S: Final = 1.0
#: How often a call is begun: a process that ended by itself may have been killed for no fault of the call.
_MAX_ATTEMPTS: Final = 2

_log = structlog.get_logger("text")


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
        """Takes over a process.

        Args:
            deployment_id: Of the deployment, for logs and errors.
            process: The first process.
            start: Starts another one like it.
            backlog: Bound on the text of the calls in the queue; None for the usual one.
        """
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
        """Makes a call and returns its answer.

        A call whose caller is cancelled is dropped: at once if it waits, soon if it has begun.

        Args:
            num_chars: The amount of text that it works on; None for a call that the bound does not concern.
            call: What to do.
            answer_type: The kind of answer that it has.
            work: What errors say that the process was doing.

        Raises:
            QueueFull: The text in the queue and this call exceed the bound.
            DeploymentNotReady: The deployment is being unloaded.
            TextRefused, TextLimitExceeded, TextProcessLost: See `TextProcess.call`.
            TextError: A new process has not started.
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
        """Returns the process; starts another one if it has ended."""
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
