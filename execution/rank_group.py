"""The rank processes of one deployment, driven from an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from bundle.manifest import Manifest
from execution.control import (
    Call,
    DiscardStaged,
    Done,
    Launch,
    Load,
    Loaded,
    RunStep,
    StageWeights,
    Stepped,
    Swapped,
    SwapWeights,
    WarmUp,
    Zeroed,
    ZeroState,
)
from execution.errors import RankDied
from execution.isa import require_isa
from execution.rank_handle import AnswerT, RankHandle
from execution.step import Step, StepResult
from execution.step_memory import StepMemory


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a rank has loaded: `done` of `total` parts; `part` is the one just loaded."""

    rank: int
    done: int
    total: int
    part: str


class RankGroup:
    """The rank processes of one deployment.

    Calls are answered in order and one step runs at a time. Every call raises `RankDied` once a rank has ended.
    Processes end with the thread that started them: start a group from a thread that lives as long as the group.

    Attributes:
        died: Its result is a `RankDied`, set when a rank ends unexpectedly; cancelled by `close`.
        weights_bytes: Bytes of the weights in use, over all ranks; 0 before `load`.
        state_bytes: Bytes of the KV cache, over all ranks; 0 before `load`.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Makes the shared memory; use `start`."""
        self.died: asyncio.Future[RankDied] = asyncio.get_running_loop().create_future()
        self.weights_bytes = 0
        self.state_bytes = 0
        self._num_parts = 1 + len(manifest.executables)
        self._memory = StepMemory(manifest)
        self._ranks: list[RankHandle] = []
        self._step = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def start(
        cls,
        manifest: Manifest,
        blob_path: Callable[[str], Path] | Mapping[str, Path],
        *,
        num_threads: int,
        log_sink: Callable[[int, str], None] | None = None,
    ) -> Self:
        """Starts one process a rank.

        Args:
            blob_path: Path of a blob by its digest; the blobs must be verified.
            num_threads: Threads that each rank computes with.
            log_sink: Called with rank and line for everything that a rank writes to its standard error; None leaves
                the ranks on this process's own.

        Raises:
            IsaUnsupported: The executables need instructions that this host lacks.
            RankDied: A process ended before it was ready.
        """
        require_isa(manifest)
        find_path = blob_path.__getitem__ if isinstance(blob_path, Mapping) else blob_path
        group = cls(manifest)
        try:
            for rank in range(manifest.tp_degree):
                paths = {digest: str(find_path(digest)) for digest in _blobs_of(manifest, rank)}
                launch = Launch(rank=rank, num_threads=num_threads, manifest=manifest, blob_paths=paths)
                group._ranks.append(RankHandle.spawn(launch, group._memory.fd, log_sink, group._report_death))
            await asyncio.gather(*(rank.wait_ready() for rank in group._ranks))
        except BaseException:
            await group.close()
            raise
        return group

    async def load(self, progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Maps weights, loads every executable, allocates zeroed state. A group that fails to load is closed.

        Raises:
            ExecutableInvalid: A blob is missing or is not what the manifest says.
            WeightsInvalid: A weight file is missing or does not fit the manifest.
        """

        async def load_rank(number: int, rank: RankHandle) -> Loaded:
            done = count(1)

            def report(part: str) -> None:
                if progress is not None:
                    progress(LoadProgress(number, next(done), self._num_parts, part))

            return await rank.call(Load(), Loaded, report)

        try:
            loaded = await asyncio.gather(*(load_rank(number, rank) for number, rank in enumerate(self._ranks)))
        except BaseException:
            await self.close()
            raise
        self.weights_bytes = sum(answer.weights_bytes for answer in loaded)
        self.state_bytes = sum(answer.state_bytes for answer in loaded)

    async def warm_up(self) -> None:
        """Runs every executable once, on the scratch slot, so that no request pays for first touches."""
        await self._call_all(WarmUp(), Done)

    async def run(self, step: Step) -> StepResult:
        """Runs one executable once on every rank.

        Raises:
            ExecutableUnknown: No executable has this tag.
            StepInvalid: The inputs do not fit, or log probabilities were asked of an executable without logits.
            StepFailed: The executable raised.
        """
        # A caller that gives up must not let the next step overwrite the inputs of the one that runs.
        return await asyncio.shield(self._run(step))

    async def stage_weights(self, shard_paths_by_rank: Mapping[int, Path]) -> None:
        """Maps new weights beside the ones in use, replacing what was staged.

        Raises:
            WeightsInvalid: A file is missing or its tensors differ from the manifest's; what served still serves.
        """
        calls = [StageWeights(path=str(shard_paths_by_rank[number])) for number in range(len(self._ranks))]
        await asyncio.gather(*(rank.call(call, Done) for rank, call in zip(self._ranks, calls, strict=True)))

    async def swap_weights(self) -> float:
        """Makes the staged weights the ones in use and lets go of the old; returns the longest pause in seconds.

        Raises:
            WeightsNotStaged: Nothing is staged.
        """
        return max(answer.duration_s for answer in await self._call_all(SwapWeights(), Swapped))

    async def discard_staged(self) -> None:
        """Lets go of staged weights, if there are any."""
        await self._call_all(DiscardStaged(), Done)

    async def zero_state(self, slots: Sequence[int] | None) -> int:
        """Zeroes the KV cache of some slots, or with None all of it; returns the bytes written, over all ranks.

        Raises:
            SlotUnknown: A slot that the KV cache does not have.
        """
        call = ZeroState(slots=None if slots is None else list(slots))
        return sum(answer.size_bytes for answer in await self._call_all(call, Zeroed))

    async def close(self) -> None:
        """Ends the processes. Calling it again is harmless."""
        self.died.cancel()
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        if not self._is_closed:
            self._is_closed = True
            self._memory.close()

    async def _run(self, step: Step) -> StepResult:
        async with self._step:
            self._memory.write_inputs(step)
            stepped = await self._call_all(RunStep(tag=step.tag, top_logprobs=step.top_logprobs), Stepped)
            return self._memory.read_result(step, max(answer.duration_s for answer in stepped))

    async def _call_all(self, call: Call, answer_type: type[AnswerT]) -> list[AnswerT]:
        return await asyncio.gather(*(rank.call(call, answer_type) for rank in self._ranks))

    def _report_death(self, death: RankDied) -> None:
        if not self.died.done():
            self.died.set_result(death)


def _blobs_of(manifest: Manifest, rank: int) -> set[str]:
    shards = (shard for weight_set in manifest.weight_sets for shard in weight_set.shards)
    weights = {shard.blob for shard in shards if shard.rank == rank}
    return weights | {executable.blob for executable in manifest.executables}
