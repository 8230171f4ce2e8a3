"""Operations that change weights or KV run between two steps, when the running requests allow it."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from bundle.errors import KilnError
from runtime_svc.engine.ranks import Ranks
from runtime_svc.engine.requests import RequestTable, aborted
from runtime_svc.engine.scheduler.scheduler import Scheduler
from runtime_svc.errors import QueueFull, RequestsInFlight

MAX_OPERATIONS: Final = 64
RETRY_AFTER_S: Final = 1.0


class InFlightPolicy(enum.Enum):
    """How an operation treats running requests, those that a slow client pauses included."""

    WAIT = enum.auto()
    ABORT = enum.auto()
    REFUSE = enum.auto()
    CONTINUE = enum.auto()
    FINISH_ON_OLD = enum.auto()


def hurrying(ranks: Ranks, policy: InFlightPolicy) -> AbstractContextManager[None]:
    """Lets ranks count as hung sooner until the block ends, if its operation aborts what they do."""
    return ranks.hurry() if policy is InFlightPolicy.ABORT else nullcontext()


@dataclass(frozen=True, slots=True)
class OperationReceipt:
    """How many running requests an operation ended, and how long no step could run because of it."""

    aborted_requests: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class ResetReceipt:
    """The receipt of a KV reset, which took `duration_s` from the call to the answer.

    It ended `affected_sequences` that ran. `freed_blocks` counts blocks or slots that were kept for later requests
    only; `zeroed_bytes` is over all ranks.
    """

    affected_sequences: int
    freed_blocks: int
    zeroed_bytes: int
    weight_epoch: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class WeightsReceipt:
    """The receipt of a weight swap."""

    previous_weight_epoch: int
    weight_epoch: int
    aborted_requests: int
    pause_s: float


@dataclass(eq=False, slots=True)
class _Operation:
    name: str
    policy: InFlightPolicy
    action: Callable[[], Awaitable[None]]
    receipt: asyncio.Future[OperationReceipt]


class OperationQueue:
    """Operations in order of arrival. The engine's loop offers the gap between two steps; callers wait for receipts."""

    def __init__(self, scheduler: Scheduler, requests: RequestTable, *, wake: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._wake = wake
        #: Those that have not ended. The engine looks twice a step whether there are any.
        self.waiting: deque[_Operation] = deque()

    async def run(self, name: str, policy: InFlightPolicy, action: Callable[[], Awaitable[None]]) -> OperationReceipt:
        """Waits until `action` has run.

        Cancelling the caller withdraws an operation that has not begun; one that has begun runs to its end.
        """
        if len(self.waiting) >= MAX_OPERATIONS:
            raise QueueFull(MAX_OPERATIONS, RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        operation = _Operation(name, policy, action, loop.create_future())
        operation.receipt.add_done_callback(lambda _: self._wake())
        self.waiting.append(operation)
        self._wake()
        return await operation.receipt

    async def run_due(self) -> None:
        """Runs the operations whose policy is met; holds new requests back while one waits for running ones."""
        while self.waiting:
            operation = self.waiting[0]
            if operation.policy is InFlightPolicy.WAIT and self._scheduler.running and not operation.receipt.done():
                self._scheduler.is_admitting = False
                return
            if not operation.receipt.done():
                await self._run(operation)
            self.waiting.popleft()
        self._scheduler.is_admitting = True

    def fail_all(self, error: KilnError) -> None:
        """Tells every caller, of the operation under way too, that its operation will not happen."""
        while self.waiting:
            operation = self.waiting.popleft()
            if not operation.receipt.done():
                operation.receipt.set_exception(error)

    async def _run(self, operation: _Operation) -> None:
        running = self._scheduler.running
        if running and operation.policy is InFlightPolicy.REFUSE:
            operation.receipt.set_exception(RequestsInFlight(len(running)))
            return
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        # Events of finished steps go out under the epoch that produced them.
        self._requests.publish()
        num_aborted = 0
        if operation.policy is InFlightPolicy.ABORT:
            num_aborted = sum(self._requests.end(one, aborted(one, operation.name)) for one in running)
        try:
            await operation.action()
        except KilnError as error:
            if not operation.receipt.done():
                operation.receipt.set_exception(error)
            return
        if not operation.receipt.done():
            operation.receipt.set_result(OperationReceipt(num_aborted, loop.time() - start_s))
