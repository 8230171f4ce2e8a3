"""Runs planning work in processes of its own, so that a call's deadline, its cancellation or the service's end ends it.

Work is what clients' configurations and checkpoints make of it, in code that other distributions may have added. A
thread cannot be ended and shares the service's interpreter and memory; a process can be killed and limited.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from bundle.confinement import PLAN
from bundle.errors import KilnError
from bundle.shortage import outlast_shortages
from compiler_svc.planning.errors import PlanFailed, PlanTimedOut, TooManyPlans
from compiler_svc.remote.errors import OutlineMissing
from execution.failure import Failure
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call

#: Named, not imported: the module loads what plans need, which takes the service nothing but time.
_PROCESS: Final = "compiler_svc.planning.process"
_RETRY_AFTER_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningLimits:
    """What planning may take. The largest models that the limits of sizes allow need seconds and some 100 MB.

    Attributes:
        max_running: Processes at once.
        max_waiting: Calls that may wait while those run.
        timeout_s: Time of one process, loading of the forkserver included.
        max_memory_bytes: Data memory of one process.
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
        """Starts nothing yet.

        Args:
            forkserver: The one that `make_forkserver` or `make_fetch_forkserver` describes.
            limits: None for those that hold by default.
            process_name: Name of its processes in process lists.
        """
        self._forkserver = forkserver
        self._limits = limits or PlanningLimits()
        self._process_name = process_name
        self._places = asyncio.Semaphore(self._limits.max_running)
        self._num_waiting = 0

    def with_limits(self, limits: PlanningLimits) -> PlanningPool:
        """A pool of the same forkserver that counts its processes apart."""
        return PlanningPool(self._forkserver, limits, process_name=self._process_name)

    async def run(self, work: Callable[[], T]) -> T:
        """Does a piece of work in a process; cancelling the call kills it.

        Args:
            work: Can be pickled, as can its result: a function of a module, or a `partial` of one.

        Raises:
            TooManyPlans: As many calls wait as may.
            PlanTimedOut, PlanMemoryExceeded: The work has reached a limit.
            PlanFailed: The process ended without an answer.
            ResourcesShort: The host has no room for the process.
            KilnError, OutlineMissing: The error that the work raised.
        """
        if self._num_waiting >= self._limits.max_waiting:
            raise TooManyPlans(self._limits.max_waiting, _RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            answer = await outlast_shortages(lambda: self._run_process(work))
        finally:
            self._places.release()
        if isinstance(answer, Failure):
            raise answer.to_error()
        if isinstance(answer, OutlineMissing):
            raise answer
        result: T = answer
        return result

    async def warm_up(self) -> None:
        """Loads what planning needs, so that the first call does not wait for that."""
        with suppress(KilnError):
            await self.run(int)

    async def _run_process(self, work: Callable[[], Any]) -> Any:
        with _open_nameless("plan-order") as order, _open_nameless("plan-answer") as answer:
            try:
                pickle.dump(work, order)
            except RecursionError as error:
                raise PlanFailed("its order is nested too deeply") from error
            order.seek(0)
            call = Call(f"{_PROCESS}:run_order", (self._limits.max_memory_bytes,))
            confinement = msgspec.structs.replace(PLAN, data_bytes=self._limits.max_memory_bytes)
            fds = [order.fileno(), answer.fileno()]
            process = self._forkserver.start(call, fds, name=self._process_name, confinement=confinement)
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    exit_code = await process.wait()
            except TimeoutError:
                raise PlanTimedOut(self._limits.timeout_s) from None
            finally:
                await asyncio.shield(process.end())
            if exit_code != 0:
                raise PlanFailed(f"its process ended without an answer ({_describe_end(exit_code)})")
            answer.seek(0)
            return pickle.load(answer)


def _open_nameless(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "w+b")


def _describe_end(exit_code: int | None) -> str:
    if exit_code is None:
        return "with the process that it was forked from"
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
