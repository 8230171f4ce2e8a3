"""Single flight: callers that want equal builds at the same time share one build."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from compiler_svc.builds.job import JobResult
from compiler_svc.compiles.build_runner import OnProgress
from compiler_svc.records import Progress

#: Starts a build.
Build = Callable[[OnProgress], Awaitable[JobResult]]


class SharedBuilds:
    """The builds in flight, by action digest."""

    def __init__(self) -> None:
        self._in_flight: dict[str, _SharedBuild] = {}

    async def run(self, action_digest: str, build: Build, on_progress: OnProgress) -> JobResult:
        """Joins the build of an action, or starts it. Cancelling the last call that waits for a build cancels it."""
        while (shared := self._in_flight.get(action_digest)) is not None and shared.is_over:
            # The former build's processes have to end before an equal build begins.
            await shared.wait()
            if self._in_flight.get(action_digest) is shared:
                del self._in_flight[action_digest]
        if shared is None:
            shared = self._in_flight[action_digest] = _SharedBuild(build)
        try:
            return await shared.join(on_progress)
        finally:
            if shared.is_over and self._in_flight.get(action_digest) is shared:
                del self._in_flight[action_digest]


class _SharedBuild:
    def __init__(self, build: Build) -> None:
        self._listeners: list[OnProgress] = []
        self._newest: Progress | None = None
        self._is_abandoned = False
        self._task = asyncio.ensure_future(build(self._tell))

    @property
    def is_over(self) -> bool:
        """Whether calls can no longer join."""
        return self._is_abandoned or self._task.done()

    async def wait(self) -> None:
        """Waits until the build has ended, with or without a result."""
        await asyncio.wait([self._task])

    async def join(self, on_progress: OnProgress) -> JobResult:
        self._listeners.append(on_progress)
        try:
            if self._newest is not None:
                await on_progress(self._newest)
            return await asyncio.shield(self._task)
        finally:
            self._listeners.remove(on_progress)
            if not self._listeners and not self._task.done():
                self._is_abandoned = True
                self._task.cancel()
                # The build's processes have ended when this call returns.
                await asyncio.wait([self._task])

    async def _tell(self, progress: Progress) -> None:
        self._newest = progress
        for listener in list(self._listeners):
            await listener(progress)
