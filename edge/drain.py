"""Counts running calls, refuses new ones of a server that drains or a client that has too many, ends stalled ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial

from edge.errors import ClientStalled, ShuttingDown, TooManyCalls
from edge.request_limit import RequestLimit
from edge.rpc_handlers import Context, SurroundingInterceptor, Surroundings

#: Names the client of a call; calls with the same name count as one client's.
NameClient = Callable[[Context], str]


def peer_address(context: Context) -> str:
    """Returns the address of a call's client without its port, such as `ipv4:10.0.0.7`; `unix:` for all of a host's."""
    peer: str = context.peer()
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class RunningCalls(SurroundingInterceptor):
    """Counts the running calls of the given services, can refuse new ones, and ends those whose clients do not read.

    It leaves alone calls of other services, such as health: health watches and reflection streams last as
    long as their clients. A call is refused before its request is parsed.
    """

    decodes_inside = True

    def __init__(
        self,
        services: Iterable[str],
        *,
        admitted_in_drain: Iterable[str] = (),
        max_calls_per_client: int,
        name_client: NameClient = peer_address,
        request_limit: Callable[[], RequestLimit] | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        """Counts no call yet.

        Args:
            services: Fully-qualified names of the services to count.
            admitted_in_drain: Those among them that take calls while the server drains.
            max_calls_per_client: Calls that one client may have running.
            name_client: Tells clients apart.
            request_limit: See `wrap_handler`.
            stall_timeout_s: See `wrap_handler`.
        """
        self.request_limit = request_limit
        self.stall_timeout_s = stall_timeout_s
        #: Calls that run, by method.
        self.running: Counter[str] = Counter()
        #: Calls that were refused because their clients had too many, by method.
        self.refused: Counter[str] = Counter()
        #: Calls that ended because their clients did not read, by method.
        self.stalled: Counter[str] = Counter()
        self._max_calls_per_client = max_calls_per_client
        self._name_client = name_client
        # Only of clients that have calls: addresses would add up.
        self._calls_of: dict[str, int] = {}
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._admitted = tuple(f"/{service}/" for service in admitted_in_drain)
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
        client = self._name_client(context)
        is_admitted = self._calls_of.get(client, 0) < self._max_calls_per_client
        self._count += 1
        self._idle.clear()
        self.running[method] += 1
        if is_admitted:
            self._calls_of[client] = self._calls_of.get(client, 0) + 1
        # Not when the handler returns: gRPC sends its last answer and the status after that.
        forget = partial(self._forget_call, method, client if is_admitted else None)
        context.add_done_callback(forget)  # type: ignore[arg-type] # the stubs want a class of theirs
        if not is_admitted:
            self.refused[method] += 1
            raise TooManyCalls(client, self._max_calls_per_client)
        if self._refusing and not method.startswith(self._admitted):
            raise ShuttingDown
        try:
            yield
        except ClientStalled:
            self.stalled[method] += 1
            raise

    def _forget_call(self, method: str, client: str | None, _context: Context) -> None:
        self._count -= 1
        self.running[method] -= 1
        if client is not None:
            self._calls_of[client] -= 1
            if not self._calls_of[client]:
                del self._calls_of[client]
        if self._count == 0:
            self._idle.set()
