"""The rank processes of one deployment, driven from an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from bundle.errors import KilnError
from bundle.manifest import Manifest
from execution.collectives.memory import CollectiveMemory
from execution.errors import RankLost, StepAborted, WeightsNotStaged
from execution.forkserver.worker import AnswerT, settle
from execution.isa import require_isa
from execution.ranks.control import (
    Call,
    DiscardStaged,
    Done,
    Launch,
    PickTokens,
    RunStep,
    StageWeights,
    Stepped,
    Swapped,
    SwapWeights,
    WarmUp,
    WriteEntry,
    Zeroed,
    ZeroState,
    meet_on_devices,
    name_format,
)
from execution.ranks.forkservers import OpenForkserver, RankForkservers
from execution.ranks.handle import LoadProgress, RankHandle
from execution.ranks.step_memory import NUM_SETS, StepMemory
from execution.ranks.watchdog import MIN_STEP_TIMEOUT_S, RankWatchdog
from execution.step import ProcessedRow, Step, StepResult
from execution.visible_cores import number_on_host
from targets.registry import find_format

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@dataclass(eq=False, slots=True)
class _StepUnderWay:
    step: Step
    memory_set: int
    result: asyncio.Future[StepResult]
    outcomes: list[Stepped | KilnError] = field(default_factory=list)


def _seen_through(
    method: Callable[Concatenate[RankGroup, P], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[RankGroup, P], Coroutine[Any, Any, ResultT]]:
    """Lets a call run to its end even if the caller is cancelled: all ranks must take part in it, and no later step may
    overwrite the inputs of a running one.
    """

    @wraps(method)
    async def call(self: RankGroup, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        task = asyncio.create_task(method(self, *args, **kwargs))
        self._calls.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    return call


class RankGroup:
    """The rank processes of one deployment.

    The ranks answer calls in order and run one step at a time. While it runs, a caller may start the next step, which
    depends on its tokens. Every call reaches all ranks: if its caller is cancelled, it still runs to its end. If a rank
    ends, hangs, or cannot do what the other ranks have done, the group is dead: its processes end and every call raises
    `RankLost`.

    Processes end with the thread that first used their forkserver, so start a group from a thread that lives as long
    as the group.

    Attributes:
        died: Its result is a `RankLost`, set when a rank ends unexpectedly; cancelled by `close`.
        weights_bytes: Bytes of the weights in use, over all ranks; 0 while there are none.
        state_bytes: Bytes of the KV cache, over all ranks; 0 before `load`.
    """

    def __init__(self, manifest: Manifest, *, min_step_timeout_s: float, with_internal: bool = False) -> None:
        """Allocates the shared memory. Callers use `start`."""
        self.died: asyncio.Future[RankLost] = asyncio.get_running_loop().create_future()
        self.weights_bytes = 0
        self.state_bytes = 0
        self._num_parts = 1 + len(manifest.executables)
        shares_memory = manifest.tp_degree > 1 and not meet_on_devices(manifest)
        self._collectives = CollectiveMemory(manifest.tp_degree) if shares_memory else None
        try:
            self._memory = StepMemory(manifest, with_internal=with_internal)
        except OSError:
            if self._collectives is not None:
                self._collectives.close()
            raise
        self._ranks: list[RankHandle] = []
        self._watchdog = RankWatchdog.of(self._ranks, manifest, min_step_timeout_s, self.end)
        self._own_forkservers: RankForkservers | None = None
        self._first_dead: RankHandle | None = None
        # A call holds it if it must come between the same two steps on all ranks. A step and the steps that depend on
        # it hold it together.
        self._turn = asyncio.Lock()
        self._steps: deque[_StepUnderWay] = deque()
        self._newest: _StepUnderWay | None = None
        self._next_set = 0
        self._has_failed_step = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @classmethod
    async def start(
        cls,
        manifest: Manifest,
        blob_path: Callable[[str], Path] | Mapping[str, Path],
        *,
        num_threads: int,
        log_sink: Callable[[int, str], None] | None = None,
        open_forkserver: OpenForkserver | None = None,
        with_internal: bool = False,
        min_step_timeout_s: float = MIN_STEP_TIMEOUT_S,
        cores: Sequence[int] = (),
    ) -> Self:
        """Starts one process for each rank.

        Args:
            blob_path: Path of a blob by its digest; the blobs must be verified.
            log_sink: Called with rank and line for each line that a rank writes to its standard error. None: the ranks
                write to this process's standard error.
            open_forkserver: Returns the forkserver of the processes, which outlives the group and makes further starts
                cheap. None starts one that ends with the group.
            with_internal: Whether steps return the internal outputs of executables, which serving never needs.
            min_step_timeout_s: Seconds after which a step whose ranks stand still counts as hung, however fast the
                steps before it were; see `watchdog`.
            cores: The logical core of each rank, for executables that run on devices, counted from 0 as by a service;
                empty for none of its own. Ranks get the host's numbers of them; see `execution.visible_cores`.
        """
        require_isa(manifest)
        executable_format = name_format(manifest)
        if executable_format:
            cores = number_on_host(find_format(executable_format), cores)
        find_path = blob_path.__getitem__ if isinstance(blob_path, Mapping) else blob_path
        group = cls(manifest, min_step_timeout_s=min_step_timeout_s, with_internal=with_internal)
        if open_forkserver is None:
            group._own_forkservers = RankForkservers(manifest.tp_degree)
            open_forkserver = group._own_forkservers.open
        try:
            forkserver = open_forkserver(num_threads, executable_format)
            for launch in Launch.list_of(
                manifest, find_path, num_threads=num_threads, with_internal=with_internal, cores=cores
            ):
                rank = RankHandle(launch, forkserver, group._memory_fds, log_sink, group._report_death)
                group._ranks.append(rank)
            await asyncio.gather(*(rank.launch() for rank in group._ranks))
        except BaseException:
            await group.close()
            raise
        return group

    async def load(self, progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Maps weights, loads every executable, allocates zeroed state. If this fails, the group is closed."""
        try:
            # The first failure ends the load: the other ranks may still have much to read.
            loaded = await asyncio.gather(*(rank.load(self._num_parts, progress) for rank in self._ranks))
        except BaseException:
            await self.close()
            raise
        self.weights_bytes = sum(answer.weights_bytes for answer in loaded)
        self.state_bytes = sum(answer.state_bytes for answer in loaded)

    @_seen_through
    async def warm_up(self) -> None:
        """Touches the whole KV cache and runs every executable once, on the scratch slot: no request waits for it."""
        async with self._turn:
            try:
                await self._call_all(WarmUp(), Done)
            except KilnError:
                self._reset_collectives()
                raise

    async def run(self, step: Step) -> StepResult:
        """Runs one executable once on every rank. Raises the errors of `begin` and of its future."""
        return await (await self.begin(step))

    async def begin(self, step: Step) -> asyncio.Future[StepResult]:
        """Starts a step on every rank. It runs after all earlier calls or, if it depends on the previous step and that
        one has not ended, immediately behind it. The caller need not wait for the result.

        A caller that always chains steps starves swaps and resets.

        Returns:
            The result. It raises:
            StepFailed: The executable raised on at least one rank, or the step that this one depends on failed.
            WeightsAwaited: The bundle came without weights and none have been swapped in.

        Raises:
            ExecutableUnknown: No executable has this tag.
            StepInvalid: The inputs do not fit, or the step asks for log probabilities but the executable has no logits.
        """
        if not (step.depends_on_previous and self._steps):
            await self._turn.acquire()
        assert len(self._steps) < NUM_SETS, "no memory for a step more"
        memory_set = self._next_set
        try:
            self._memory.write_inputs(step, memory_set)
        except BaseException:
            if not self._steps:
                self._turn.release()
            raise
        self._next_set = (memory_set + 1) % NUM_SETS
        return self._call_step(RunStep.of(step, memory_set), step, memory_set)

    async def pick(self, processed: Sequence[ProcessedRow]) -> asyncio.Future[StepResult]:
        """Has tokens picked that the newest step has left, behind it if it has not ended; returns its result with them.

        The result raises what that of the step does. Rows that are not `processed` still have no token.
        """
        newest = self._newest
        assert newest is not None, "it leaves rows"
        if not self._steps:
            await self._turn.acquire()
        call = PickTokens(tag=newest.step.tag, processed=tuple(processed))
        return self._call_step(call, newest.step, newest.memory_set)

    def _call_step(self, call: RunStep | PickTokens, step: Step, memory_set: int) -> asyncio.Future[StepResult]:
        under_way = _StepUnderWay(step, memory_set, asyncio.get_running_loop().create_future())
        self._steps.append(under_way)
        self._newest = under_way
        on_answer = partial(self._take_answer, under_way)
        for rank in self._ranks:
            rank.begin(call, on_answer)
        return under_way.result

    @_seen_through
    async def stage_weights(self, shard_paths_by_rank: Mapping[int, Path]) -> None:
        """Maps new weights beside those in use, on all ranks or on none. They replace any others there."""
        calls = [StageWeights(path=str(shard_paths_by_rank[number])) for number in range(len(self._ranks))]
        try:
            await self._gather([rank.ask(call, Done) for rank, call in zip(self._ranks, calls, strict=True)])
        except KilnError:
            await self._call_all(DiscardStaged(), Done)
            raise

    @_seen_through
    async def swap_weights(self, *, keeps_old: bool = False) -> float:
        """Puts the staged weights in use; returns the longest pause of a rank in seconds.

        It releases the old ones, or keeps them for steps `with_old` and for another swap, which puts them back. If one
        rank swaps and another cannot, the group ends.
        """
        async with self._turn:
            swapped = await self._change_weights(
                [rank.ask(SwapWeights(keeps_old=keeps_old), Swapped) for rank in self._ranks], WeightsNotStaged
            )
            self.weights_bytes = sum(answer.weights_bytes for answer in swapped)
            return max(answer.duration_s for answer in swapped)

    @_seen_through
    async def discard_staged(self) -> None:
        """Releases the weights that are not in use, if there are any."""
        await self._call_all(DiscardStaged(), Done)

    @_seen_through
    async def check(self, weight_set: str, paths_by_rank: Mapping[int, Path]) -> None:
        """Checks that files, one for each rank, are entries of a mutable weight set, while steps run.

        Raises what `write` raises before it writes.
        """
        await self._gather(self._ask_to_write(weight_set, 0, paths_by_rank, only_check=True))

    @_seen_through
    async def write(self, weight_set: str, index: int, paths_by_rank: Mapping[int, Path] | None) -> None:
        """Writes one entry of a mutable weight set between two steps, on all ranks or on none; None zeroes it.

        Every rank first checks its file; see `execution.executors.executor.Executor.write` for files and errors. If a
        rank cannot write what it has checked, the group ends.
        """
        await self._gather(self._ask_to_write(weight_set, index, paths_by_rank, only_check=True))
        async with self._turn:
            await self._change_weights(self._ask_to_write(weight_set, index, paths_by_rank, only_check=False))

    @_seen_through
    async def zero_state(self, slots: Sequence[int] | None) -> int:
        """Zeroes the given slots of the KV cache, or all of it for None; returns the bytes written, over all ranks."""
        call = ZeroState(slots=None if slots is None else list(slots))
        async with self._turn:
            return sum(answer.size_bytes for answer in await self._call_all(call, Zeroed))

    def hurry(self) -> AbstractContextManager[None]:
        """Gives steps a tenth of their time until the block ends: someone waits who has no use for their results."""
        return self._watchdog.hurrying()

    def end(self, verdict: RankLost) -> None:
        """Kills the processes, which cannot serve on: calls raise `verdict`, and `died` has it."""
        for rank in self._ranks:
            rank.kill(verdict)

    async def close(self) -> None:
        """Ends the processes. Calling it again is harmless."""
        self._watchdog.stop()
        self.died.cancel()
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        if not self._is_closed:
            self._is_closed = True
            self._memory.close()
            if self._own_forkservers is not None:
                self._own_forkservers.close()
            if self._collectives is not None:
                self._collectives.close()

    @property
    def _memory_fds(self) -> tuple[int, ...]:
        return (self._memory.fd,) if self._collectives is None else (self._memory.fd, self._collectives.fd)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            # Marks the error as retrieved, because the caller may have been cancelled.
            task.exception()

    def _take_answer(self, step: _StepUnderWay, outcome: Stepped | KilnError) -> None:
        """Ends a step that all ranks have answered, even if its caller no longer waits."""
        step.outcomes.append(outcome)
        if len(step.outcomes) < len(self._ranks):
            return
        ended = self._steps.popleft()
        assert ended is step, "ranks answer in order"
        try:
            stepped = self._unwrap(step.outcomes)
            duration_s = max(answer.duration_s for answer in stepped)
            self._watchdog.note_step(duration_s)
            settle(step.result, self._memory.read_result(step.step, step.memory_set, duration_s))
        except Exception as error:  # noqa: BLE001 - the caller gets every error
            self._has_failed_step = True
            settle(step.result, error)
        if self._steps:
            return
        if self._has_failed_step:
            # Only now: a rank may be in the next step, which another rank will not join.
            self._has_failed_step = False
            self._reset_collectives()
        self._turn.release()

    def _reset_collectives(self) -> None:
        # All ranks have answered, so none is in a collective.
        if self._collectives is not None:
            self._collectives.reset()

    def _ask_to_write(
        self, weight_set: str, index: int, paths_by_rank: Mapping[int, Path] | None, *, only_check: bool
    ) -> list[Coroutine[Any, Any, Done]]:
        paths = [None if paths_by_rank is None else str(paths_by_rank[rank.rank]) for rank in self._ranks]
        calls = [WriteEntry(weight_set=weight_set, index=index, path=one, only_check=only_check) for one in paths]
        return [rank.ask(call, Done) for rank, call in zip(self._ranks, calls, strict=True)]

    async def _call_all(self, call: Call, answer_type: type[AnswerT]) -> list[AnswerT]:
        return await self._gather([rank.ask(call, answer_type) for rank in self._ranks])

    async def _gather(self, calls: Sequence[Coroutine[Any, Any, AnswerT]]) -> list[AnswerT]:
        return self._unwrap(await asyncio.gather(*calls, return_exceptions=True))

    async def _change_weights(
        self, calls: Sequence[Coroutine[Any, Any, AnswerT]], harmless: type[KilnError] | tuple[()] = ()
    ) -> list[AnswerT]:
        """Ends the group if one of the calls fails, unless all do with the error that changes nothing."""
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failed = [isinstance(outcome, BaseException) for outcome in outcomes]
        if any(failed) and not all(isinstance(outcome, harmless) for outcome in outcomes):
            # Ranks with different weights would compute garbage.
            self._ranks[failed.index(True)].kill()
            await self._ranks[failed.index(True)].wait_ended()
        return self._unwrap(outcomes)

    def _unwrap(self, outcomes: Sequence[AnswerT | BaseException]) -> list[AnswerT]:
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures:
            return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        if self._first_dead is not None and self._first_dead.death is not None:
            raise self._first_dead.death
        # Prefer the error of the rank that failed first to the errors that it caused on others.
        raise min(failures, key=lambda failure: isinstance(failure, StepAborted))

    def _report_death(self, rank: RankHandle) -> None:
        """Ends the other ranks, which cannot work alone and may be waiting for the dead one."""
        if self._first_dead is None:
            self._first_dead = rank
        if not self.died.done() and isinstance(rank.death, RankLost):
            self.died.set_result(rank.death)
        for other in self._ranks:
            other.kill()
