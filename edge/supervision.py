"""Sees to it that what a server does in the background goes on, and that every failure there is noticed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

import structlog

from bundle.errors import KilnError
from bundle.host.backoff import backoff_delays

#: Seconds before an ended task starts again: the first time, and at most.
FIRST_RESTART_S: Final = 1.0
MAX_RESTART_S: Final = 60.0
#: A task that has run for so many seconds is well.
SETTLED_S: Final = 60.0
#: A task that has failed so often without having been well in between is failing.
NUM_FAILURES: Final = 3

ResultT = TypeVar("ResultT")

_log = structlog.get_logger("background")


def report_failure(task: asyncio.Task[Any]) -> None:
    """Reports the error of a short task whose caller may have left; add it to the task as a callback.

    A named error is logged. Any other one goes to the event loop's handler of exceptions, which a `Supervisor` counts.
    """
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, KilnError):
        _log.warning("task failed", task=_name_task(task), reason=error.reason, error=str(error))
    else:
        task.get_loop().call_exception_handler({"message": "task failed", "exception": error, "task": task})


def begin_task(coroutine: Coroutine[Any, Any, ResultT], tasks: set[asyncio.Task[ResultT]]) -> asyncio.Task[ResultT]:
    """Begins a short task that runs to its end even if no one awaits it; see `report_failure`.

    `tasks` has it until it ends, because the event loop alone would not keep it alive.
    """
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(report_failure)
    return task


@dataclass(slots=True)
class _Supervised:
    task: asyncio.Task[None] | None = None
    failures_in_a_row: int = 0
    delays_s: Iterator[float] = field(default_factory=lambda: backoff_delays(FIRST_RESTART_S, MAX_RESTART_S))


class Supervisor:
    """Runs the tasks of a server that last as long as it does, and starts each again that ends."""

    def __init__(self, tell_well: Callable[[bool], None]) -> None:
        """Runs nothing yet; calls `tell_well` after each failure, and when a task is well again.

        It is told False while one fails again and again.
        """
        #: Failures by task: unexpected ends of supervised ones, and errors that reached the event loop.
        self.failures: Counter[str] = Counter()
        self._tell_well = tell_well
        self._supervised: dict[str, _Supervised] = {}
        self._is_watching = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def tasks(self) -> frozenset[str]:
        """The names of what is supervised."""
        return frozenset(self._supervised)

    def watch_loop(self) -> None:
        """From now on also logs and counts errors of callbacks, and of tasks that no one awaits, on this event loop."""
        self._is_watching = True
        asyncio.get_running_loop().set_exception_handler(self._note_lost_error)

    def supervise(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a task until `close`.

        `run` runs until it is cancelled; it begins with its work, or waits for less than `SETTLED_S` before.
        """
        assert name not in self._supervised, f"{name} runs already"
        # A counter that begins with its first failure hides that one from rates.
        self.failures[name] = 0
        row = self._supervised[name] = _Supervised()
        # In an empty context: log lines must not carry what belongs to a call.
        row.task = asyncio.create_task(self._keep(name, row, run), name=name, context=Context())

    async def close(self) -> None:
        """Cancels every task, and waits until it has ended. Calling it again is harmless."""
        tasks = [row.task for row in self._supervised.values() if row.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._is_watching:
            self._is_watching = False
            asyncio.get_running_loop().set_exception_handler(None)

    async def _keep(self, name: str, row: _Supervised, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            settling = task.get_loop().call_later(SETTLED_S, self._settle, row)
            error: BaseException | None = None
            try:
                await run()
            except asyncio.CancelledError as cancelled:
                if task.cancelling():
                    raise
                # Something that it awaited was cancelled, and not the task.
                error = cancelled
            except Exception as failure:  # noqa: BLE001 - whatever it is, the task has to go on
                error = failure
            finally:
                settling.cancel()
            self.failures[name] += 1
            row.failures_in_a_row += 1
            delay_s = next(row.delays_s)
            _log.error(
                "background task ended",
                task=name,
                failures_in_a_row=row.failures_in_a_row,
                restart_s=round(delay_s, 1),
                exc_info=error,
            )
            self._tell_state()
            await asyncio.sleep(delay_s)

    def _settle(self, row: _Supervised) -> None:
        row.failures_in_a_row = 0
        row.delays_s = backoff_delays(FIRST_RESTART_S, MAX_RESTART_S)
        self._tell_state()

    def _tell_state(self) -> None:
        self._tell_well(all(row.failures_in_a_row < NUM_FAILURES for row in self._supervised.values()))

    def _note_lost_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            loop.default_exception_handler(context)
            return
        name = _name_task(context.get("task") or context.get("future") or context.get("handle"))
        self.failures[name] += 1
        _log.error("background task failed", task=name, detail=context["message"], exc_info=error)


def _name_task(source: object) -> str:
    """Names what failed by its function, of which there are few, unlike names of tasks."""
    if isinstance(source, asyncio.Task):
        return str(getattr(source.get_coro(), "__qualname__", "task"))
    function = getattr(source, "_callback", None)
    return str(getattr(getattr(function, "func", function), "__qualname__", "callback"))
