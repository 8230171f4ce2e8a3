"""The rank processes of one deployment, driven from an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bundle.manifest import Manifest
from execution.errors import RankDied
from execution.step import Step, StepResult


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

    died: asyncio.Future[RankDied]
    weights_bytes: int
    state_bytes: int

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
        raise NotImplementedError

    async def load(self, progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Maps weights, loads every executable, allocates zeroed state. A group that fails to load is closed.

        Raises:
            ExecutableInvalid: A blob is missing or is not what the manifest says.
            WeightsInvalid: A weight file is missing or does not fit the manifest.
        """
        raise NotImplementedError

    async def warm_up(self) -> None:
        """Runs every executable once, on the scratch slot, so that no request pays for first touches."""
        raise NotImplementedError

    async def run(self, step: Step) -> StepResult:
        """Runs one executable once on every rank.

        Raises:
            ExecutableUnknown: No executable has this tag.
            StepInvalid: The inputs do not fit, or log probabilities were asked of an executable without logits.
            StepFailed: The executable raised.
        """
        raise NotImplementedError

    async def stage_weights(self, shard_paths_by_rank: Mapping[int, Path]) -> None:
        """Maps new weights beside the ones in use, replacing what was staged.

        Raises:
            WeightsInvalid: A file is missing or its tensors differ from the manifest's; what served still serves.
        """
        raise NotImplementedError

    async def swap_weights(self) -> float:
        """Makes the staged weights the ones in use and lets go of the old; returns the longest pause in seconds.

        Raises:
            WeightsNotStaged: Nothing is staged.
        """
        raise NotImplementedError

    async def discard_staged(self) -> None:
        """Lets go of staged weights, if there are any."""
        raise NotImplementedError

    async def zero_state(self, slots: Sequence[int] | None) -> int:
        """Zeroes the KV cache of some slots, or with None all of it; returns the bytes written, over all ranks.

        Raises:
            SlotUnknown: A slot that the KV cache does not have.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the processes. Calling it again is harmless."""
        raise NotImplementedError
