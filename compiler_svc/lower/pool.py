"""Runs several lowerings at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Final

import msgspec
import structlog

from bundle.host.confinement import LOWERING
from bundle.host.shortage import find_shortage, outlast_shortages
from compiler_svc.lower.errors import (
    LoweringFailed,
    LoweringMemoryExceeded,
    LoweringTimedOut,
    may_hide_memory_limit,
)
from compiler_svc.lower.job import LoweredExecutable, LoweringBackend, LoweringJob
from compiler_svc.lower.memory_watch import MemoryWatch
from execution.failure import name_cause
from execution.forkserver.client import Forkserver, ForkserverClient
from execution.forkserver.protocol import Call
from execution.forkserver.task import Ending, decode, encode, run_task
from execution.forkserver.watch import PATIENCE_S
from execution.ranks.forkservers import INDUCTOR_ENVIRONMENT

#: Inductor reads these variables when it is loaded. Without the first it starts a pool of processes and a thread that
#: reads their answers, and a process with threads cannot fork.
LOWERING_ENVIRONMENT: Final = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **INDUCTOR_ENVIRONMENT}

#: Named, not imported: the module loads torch, which the service must not.
_LOWERING_PROCESS: Final = "compiler_svc.lower.process"
_LOG_TAIL_LINES: Final = 40

_log = structlog.get_logger("build")


@dataclass(frozen=True, slots=True)
class LoweringProgress:
    """One executable is ready: number `done` of `total`. Its lowering took `duration_s` seconds."""

    tag: str
    done: int
    total: int
    duration_s: float
    executable: LoweredExecutable


class LoweringPool:
    """Runs lowerings in processes of their own, a limited number at once."""

    def __init__(
        self,
        forkserver: ForkserverClient,
        *,
        num_processes: int,
        timeout_s: float,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """`memory_limit_bytes` limits each process of one lowering, including the C++ compiler's."""
        self._forkserver = forkserver
        self._slots = asyncio.Semaphore(num_processes)
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_bytes

    async def lower(
        self, jobs: Sequence[LoweringJob], on_progress: Callable[[LoweringProgress], None] | None = None
    ) -> tuple[LoweredExecutable, ...]:
        """Lowers all jobs. The first failure, or cancelling the call, ends all lowerings and their child processes.

        Returns executables in the order of the jobs; their files are in the jobs' directories.
        """
        done = 0

        async def lower_one(job: LoweringJob) -> LoweredExecutable:
            nonlocal done
            async with self._slots:
                started = time.perf_counter()
                executable = await self._lower(job)
                done += 1
                if on_progress is not None:
                    duration_s = time.perf_counter() - started
                    on_progress(LoweringProgress(job.tag, done, len(jobs), duration_s, executable))
                return executable

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(lower_one(job)) for job in jobs]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    async def _lower(self, job: LoweringJob) -> LoweredExecutable:
        lowering = job.options.lowering
        if lowering.in_process:
            backend: LoweringBackend = resolve_name(str(lowering.backend))
            return backend(job)
        lowering.toolchain.require_programs()
        ending, memory = await outlast_shortages(partial(self._run, job))
        error = ending.failure
        if ending.answer is not None and error is None:
            return decode(ending.answer, LoweredExecutable)
        output, how = job.log_path.read_text(errors="replace"), name_cause(ending.exit_code)
        if error is not None:
            if may_hide_memory_limit(error):
                self._check_memory(job, memory, f"{output}\n{error}")
            if not isinstance(error, LoweringFailed):
                raise error
            how = error.metadata["how"]
        self._check_memory(job, memory, output)
        tail = _tail(output)
        # It quotes generated code and directories of this host, so no client gets it.
        _log.error("lowering failed", tag=job.tag, how=how, output=tail)
        raise find_shortage(RuntimeError(tail)) or LoweringFailed(job.tag, how)

    def _check_memory(self, job: LoweringJob, memory: MemoryWatch, output: str) -> None:
        limit_bytes = self._memory_limit_bytes
        if limit_bytes is not None and memory.explains_end(limit_bytes + job.reserved_bytes, output):
            raise LoweringMemoryExceeded(job.tag, limit_bytes)

    async def _run(self, job: LoweringJob) -> tuple[Ending, MemoryWatch]:
        limit_bytes = self._memory_limit_bytes
        data_bytes = None if limit_bytes is None else limit_bytes + job.reserved_bytes
        memory = MemoryWatch()
        with job.log_path.open("wb") as log:
            try:
                ending = await run_task(
                    self._forkserver,
                    Call(f"{_LOWERING_PROCESS}:run_job"),
                    encode(job),
                    name="kiln-lowering",
                    confinement=msgspec.structs.replace(LOWERING, data_bytes=data_bytes),
                    stderr_fd=log.fileno(),
                    timeout_s=self._timeout_s,
                    watching=memory.watching,
                )
            except TimeoutError:
                raise LoweringTimedOut(job.tag, self._timeout_s) from None
        return ending, memory


def make_forkserver(parent: ForkserverClient | None = None, *, patience_s: float = PATIENCE_S) -> Forkserver:
    """Describes the forkserver of lowerings, which loads Inductor when the first lowering starts. The environment of a
    parent (see `Forkserver`) has `LOWERING_ENVIRONMENT`.
    """
    return Forkserver(
        "kiln-lowerings",
        Call(f"{_LOWERING_PROCESS}:preload"),
        kind="build",
        environment=None if parent else LOWERING_ENVIRONMENT,
        parent=parent,
        patience_s=patience_s,
    )


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_LOG_TAIL_LINES:])
