"""Runs planning work in processes of its own, so that a call's deadline, its cancellation or the service's end ends it.

Work is what clients' configurations and checkpoints make of it, in code that other distributions may have added. A
thread cannot be ended and shares the service's interpreter and memory; a process can be killed and limited.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from bundle.errors import KilnError
from bundle.host.confinement import PLAN
from bundle.host.shortage import outlast_shortages
from compiler_svc.planning.errors import PlanFailed, PlanTimedOut, TooManyPlans
from compiler_svc.remote.errors import OutlineMissing
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.forkserver.task import Ending, run_task

#: Named, not imported: the module loads what plans need, which takes the service nothing but time.
_PROCESS: Final = "compiler_svc.planning.process"
_RETRY_AFTER_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningLimits:
    """What planning may take. The largest models that the limits of sizes allow need seconds and some 100 MB.

    `max_waiting` calls may wait while others run; `timeout_s` counts loading of the forkserver, too; `max_memory_bytes`
    is data memory. Both limit one process.
    """

    max_running: int = 4
    max_waiting: int = 64
    timeout_s: float = 60.0
    max_memory_bytes: int = 2 << 30


def make_forkserver() -> Forkserver:
    """Describes the forkserver of planning processes, which loads what they need when the first one is requested."""
    return Forkserver("kiln-plans", Call(f"{_PROCESS}:preload"), kind="plan")


def make_fetch_forkserver() -> Forkserver:
    """Describes the forkserver of processes that fetch checkpoints, which alone have the credentials for that."""
    return Forkserver("kiln-fetches", Call(f"{_PROCESS}:preload_fetching"), kind="fetch")


class PlanningPool:
    """Runs planning work, a bounded number at once."""

    def __init__(
        self, forkserver: Forkserver, limits: PlanningLimits | None = None, *, process_name: str = "kiln-plan"
    ) -> None:
        self._forkserver = forkserver
        self._limits = limits or PlanningLimits()
        self._process_name = process_name
        self._places = asyncio.Semaphore(self._limits.max_running)
        self._num_waiting = 0

    def with_limits(self, limits: PlanningLimits) -> PlanningPool:
        """A pool of the same forkserver that counts its processes apart."""
        return PlanningPool(self._forkserver, limits, process_name=self._process_name)

    async def run(self, work: Callable[[], T]) -> T:
        """Does a piece of work in a process; cancelling the call kills it. Work and result can be pickled: the work is
        a function of a module, or a `partial` of one.
        """
        if self._num_waiting >= self._limits.max_waiting:
            raise TooManyPlans(self._limits.max_waiting, _RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            ending = await outlast_shortages(lambda: self._run_process(work))
        finally:
            self._places.release()
        # Outside of the repetition: a shortage that the work itself met is its answer.
        if (packet := ending.result()) is None:
            raise PlanFailed(f"its process ended without an answer ({ending})")
        answer = pickle.loads(packet)
        if isinstance(answer, OutlineMissing):
            raise answer
        result: T = answer
        return result

    async def warm_up(self) -> None:
        """Loads what planning needs, so that the first call does not wait for that."""
        with suppress(KilnError):
            await self.run(int)

    async def _run_process(self, work: Callable[[], Any]) -> Ending:
        limits = self._limits
        try:
            order = pickle.dumps(work)
        except RecursionError as error:
            raise PlanFailed("its order is nested too deeply") from error
        try:
            return await run_task(
                self._forkserver,
                Call(f"{_PROCESS}:run_order", (limits.max_memory_bytes,)),
                order,
                name=self._process_name,
                confinement=msgspec.structs.replace(PLAN, data_bytes=limits.max_memory_bytes),
                timeout_s=limits.timeout_s,
            )
        except TimeoutError:
            raise PlanTimedOut(limits.timeout_s) from None
