"""Refuses new calls when a server drains, and tells when the last running one has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial

from edge.errors import ShuttingDown
from edge.rpc_handlers import Context, SurroundingInterceptor, Surroundings


class RunningCalls(SurroundingInterceptor):
    """Counts the running calls of the given services, and can refuse new ones.

    It neither counts nor refuses calls of other services, such as health: health watches and reflection streams last as
    long as their clients.
    """

    def __init__(self, services: Iterable[str], *, never_refused: Iterable[str] = ()) -> None:
        """Takes the fully-qualified names of the services to count, and of those among them that are never refused."""
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._admitted = tuple(f"/{service}/" for service in never_refused)
        self._count = 0
        self._refusing = False
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse_new(self) -> None:
        """Makes every new call, but those of services that are never refused, end with ShuttingDown from now on."""
        self._refusing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no call runs, at most `timeout_s`; returns whether none runs."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._count == 0

    def surround(self, method: str) -> Surroundings | None:
        """Counts the calls of counted services."""
        if not method.startswith(self._prefixes):
            return None
        return partial(self._count_call, method.startswith(self._admitted))

    @asynccontextmanager
    async def _count_call(self, is_admitted: bool, context: Context) -> AsyncIterator[None]:
        self._count += 1
        self._idle.clear()
        # Not when the handler returns: gRPC sends its last answer and the status after that.
        context.add_done_callback(self._forget_call)  # type: ignore[arg-type] # the stubs want a class of theirs
        if self._refusing and not is_admitted:
            raise ShuttingDown
        yield

    def _forget_call(self, _context: Context) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()
