"""What a service asks of its rank processes, and what they answer; `Launch` comes first.

Step inputs and results are not in messages but in shared memory; see `step_memory`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from bundle.manifest import Manifest
from execution.failure import Failure
from execution.forkserver.worker import Progress
from execution.step import ProcessedRow, Step
from targets.registry import find_format


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to know before other calls. The answer is `Done`."""

    rank: int
    num_threads: int
    manifest: Manifest
    #: Paths of blobs by digest.
    blob_paths: dict[str, str]
    #: Whether the step memory has room for internal outputs, which the rank then writes in every step.
    with_internal: bool
    #: The logical core that is the rank's own, as the host numbers it; None: no matter which.
    core: int | None = None
    #: Where the group's first rank listens for the others, as `host:port`; empty if they need no such place.
    meeting_place: str = ""

    @classmethod
    def list_of(
        cls,
        manifest: Manifest,
        find_path: Callable[[str], Path],
        *,
        num_threads: int,
        with_internal: bool,
        cores: Sequence[int],
    ) -> list[Self]:
        """Describes all ranks of a group, each with the paths of the blobs that it needs.

        `cores` has the logical core of each rank, as the host numbers it; it is empty if they have none of their own.
        """
        programs = {executable.blob for executable in manifest.executables}
        meeting_place = _choose_meeting_place() if manifest.tp_degree > 1 and meet_on_devices(manifest) else ""
        launches = []
        for rank in range(manifest.tp_degree):
            weights = {shard.blob for shard in manifest.shards() if shard.rank == rank and shard.blob is not None}
            launches.append(
                cls(
                    rank=rank,
                    num_threads=num_threads,
                    manifest=manifest,
                    blob_paths={digest: str(find_path(digest)) for digest in weights | programs},
                    with_internal=with_internal,
                    core=cores[rank] if cores else None,
                    meeting_place=meeting_place,
                )
            )
        return launches


def name_format(manifest: Manifest) -> str:
    """Names the format of all executables; empty if there are none, which `Load` reports."""
    return next((executable.format for executable in manifest.executables), "")


def meet_on_devices(manifest: Manifest) -> bool:
    """Whether ranks exchange tensors through devices of their own, and not through the host's memory."""
    return any(find_format(executable.format).meeting_variable for executable in manifest.executables)


def _choose_meeting_place() -> str:
    """A port of this host that nothing listens on now; its user takes it later, and fails if another one was faster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    return f"{host}:{port}"


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A message that is tagged with its class's name."""


class Load(_Message, frozen=True):
    """Map weights, load executables, allocate state. The answer is `Loaded`, after one `Progress` per part."""


class WarmUp(_Message, frozen=True):
    """Run every executable once, on the scratch slot. The answer is `Done`."""


class RunStep(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Run the executable whose inputs are in shared memory. The answer is `Stepped`; the results are there too."""

    tag: str
    #: The set of regions that the step uses; see `step_memory`.
    memory_set: int
    #: Take the tokens of the previous step as `input_ids`.
    depends_on_previous: bool
    top_logprobs: int | None
    return_logits: bool
    processed: tuple[ProcessedRow, ...] = ()
    #: Rows whose tokens `PickTokens` picks; they have none until then.
    left: tuple[int, ...] = ()
    reported: tuple[str, ...] = ()
    with_old: bool = False

    @classmethod
    def of(cls, step: Step, memory_set: int) -> Self:
        """Tells all of a step but its inputs."""
        return cls(
            tag=step.tag,
            memory_set=memory_set,
            depends_on_previous=step.depends_on_previous,
            top_logprobs=step.top_logprobs,
            return_logits=step.return_logits,
            processed=step.processed,
            left=step.left,
            reported=step.reported,
            with_old=step.with_old,
        )


class PickTokens(_Message, frozen=True, kw_only=True):
    """Pick tokens that the newest step, which is one of `tag`, has left. The answer is `Stepped`, as if the step had
    picked them; the results are where the step's are.
    """

    tag: str
    processed: tuple[ProcessedRow, ...]


class StageWeights(_Message, frozen=True, kw_only=True):
    """Map other weights. The answer is `Done`."""

    path: str


class SwapWeights(_Message, frozen=True, kw_only=True):
    """Put the staged weights in use, and keep the old ones in their place or release them. The answer is `Swapped`."""

    keeps_old: bool


class DiscardStaged(_Message, frozen=True):
    """Release the weights that are not in use. The answer is `Done`."""


class WriteEntry(_Message, frozen=True, kw_only=True):
    """Write one entry of a mutable weight set, or only check whether that can be done. The answer is `Done`."""

    weight_set: str
    index: int
    #: The file of the entry; None zeroes it.
    path: str | None
    only_check: bool


class ZeroState(_Message, frozen=True, kw_only=True):
    """Zero slots of the KV cache, None for all. The answer is `Zeroed`."""

    slots: list[int] | None


class Done(_Message, frozen=True):
    """The call has succeeded."""


class Loaded(_Message, frozen=True, kw_only=True):
    """All parts have been loaded."""

    weights_bytes: int
    state_bytes: int


class Stepped(_Message, frozen=True, kw_only=True):
    """The step has ended."""

    duration_s: float


class Swapped(_Message, frozen=True, kw_only=True):
    """The weights are in use. No step could run during the swap."""

    duration_s: float
    weights_bytes: int


class Zeroed(_Message, frozen=True, kw_only=True):
    """The slots are zero."""

    size_bytes: int


Call = Load | WarmUp | RunStep | PickTokens | StageWeights | SwapWeights | DiscardStaged | WriteEntry | ZeroState
Answer = Done | Loaded | Stepped | Swapped | Zeroed

decode_launch = msgspec.msgpack.Decoder(Launch).decode
decode_call: Callable[[bytes], Call] = msgspec.msgpack.Decoder(Call).decode
decode_answer: Callable[[bytes], Answer | Progress | Failure] = msgspec.msgpack.Decoder(
    Answer | Progress | Failure
).decode
