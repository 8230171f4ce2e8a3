"""Breaks what a server does in the background."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from edge.supervision import Supervisor
from tests.hang_guard import HANG_S

#: What waits for a future that nothing but the waiting depends on.
_PAUSES: Final = {"sleep", "Event.wait"}


class Broken(Exception):
    """An error that no code expects."""


async def break_task(supervisor: Supervisor, name: str) -> None:
    """Throws an error into a supervised task where it pauses, and waits until that is counted."""
    task: Any = supervisor._supervised[name].task
    num_failures = supervisor.failures[name]
    async with asyncio.timeout(HANG_S):
        while not _is_paused(task):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task._fut_waiter.set_exception(Broken(name))
        while supervisor.failures[name] == num_failures:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert supervisor.failures[name] == num_failures + 1
    assert not task.done()


def _is_paused(task: Any) -> bool:
    """Whether the task waits in a pause of its own, not in one of the supervisor's."""
    names, awaited = [], task.get_coro()
    while hasattr(awaited, "cr_await"):
        names.append(awaited.__qualname__)
        awaited = awaited.cr_await
    waiter = task._fut_waiter
    return len(names) > 2 and names[-1] in _PAUSES and waiter is not None and not waiter.done()
