"""Refuses new calls when a server drains, tells when the last running one has ended, and ends stalled ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial

from edge.errors import ClientStalled, ShuttingDown
from edge.rpc_handlers import Context, SurroundingInterceptor, Surroundings


class RunningCalls(SurroundingInterceptor):
    """Counts the running calls of the given services, can refuse new ones, and ends those whose clients do not read.

    It leaves alone calls of other services, such as health: health watches and reflection streams last as
    long as their clients.
    """

    def __init__(
        self, services: Iterable[str], *, never_refused: Iterable[str] = (), stall_timeout_s: float | None = None
    ) -> None:
        """Counts no call yet.

        Args:
            services: Fully-qualified names of the services to count.
            never_refused: Those among them that are never refused.
            stall_timeout_s: See `wrap_handler`.
        """
        self.stall_timeout_s = stall_timeout_s
        #: Calls that ended because their clients did not read, by method.
        self.stalled: Counter[str] = Counter()
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
        return partial(self._count_call, method)

    @asynccontextmanager
    async def _count_call(self, method: str, context: Context) -> AsyncIterator[None]:
        self._count += 1
        self._idle.clear()
        # Not when the handler returns: gRPC sends its last answer and the status after that.
        context.add_done_callback(self._forget_call)  # type: ignore[arg-type] # the stubs want a class of theirs
        if self._refusing and not method.startswith(self._admitted):
            raise ShuttingDown
        try:
            yield
        except ClientStalled:
            self.stalled[method] += 1
            raise

    def _forget_call(self, _context: Context) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()
