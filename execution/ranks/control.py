"""What a service and its rank processes say to each other: one message a packet, over sockets that keep packets whole.

Calls are answered in order. Step inputs and results are not in here but in shared memory; see `step_memory`.
"""

from __future__ import annotations

import msgspec

from bundle.manifest import Manifest
from execution.failure import Failure

#: No message is longer; the largest is a failure that names every tensor of a weight file.
PACKET_SIZE_BYTES = 1 << 17


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank process is started with; handed over as a file, for manifests are long."""

    rank: int
    num_threads: int
    manifest: Manifest
    #: Paths of blobs by digest.
    blob_paths: dict[str, str]


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Carries its class's name."""


class Load(_Message, frozen=True):
    """Map weights, load executables, allocate state. Answered by `Loaded`, after one `Progress` a part."""


class WarmUp(_Message, frozen=True):
    """Run every executable once, on the scratch slot. Answered by `Done`."""


class RunStep(_Message, frozen=True, kw_only=True):
    """Run the executable whose inputs are in shared memory. Answered by `Stepped`, with the results there too."""

    tag: str
    #: Which of the sets of regions the step uses; see `step_memory`.
    memory_set: int
    #: Take the tokens of the previous step as `input_ids`.
    depends_on_previous: bool
    top_logprobs: int | None
    return_logits: bool


class StageWeights(_Message, frozen=True, kw_only=True):
    """Map other weights. Answered by `Done`."""

    path: str


class SwapWeights(_Message, frozen=True):
    """Put them in use. Answered by `Swapped`."""


class DiscardStaged(_Message, frozen=True):
    """Let go of them. Answered by `Done`."""


class ZeroState(_Message, frozen=True, kw_only=True):
    """Zero slots, None for all. Answered by `Zeroed`."""

    slots: list[int] | None


class Done(_Message, frozen=True):
    """Nothing else to say. A rank's first message, in answer to nothing, says that it is ready."""


class Progress(_Message, frozen=True, kw_only=True):
    """A part has been loaded."""

    part: str


class Loaded(_Message, frozen=True, kw_only=True):
    """Everything is loaded."""

    weights_bytes: int
    state_bytes: int


class Stepped(_Message, frozen=True, kw_only=True):
    """The step is done."""

    duration_s: float


class Swapped(_Message, frozen=True, kw_only=True):
    """The weights are in use; no step could run meanwhile."""

    duration_s: float
    weights_bytes: int


class Zeroed(_Message, frozen=True, kw_only=True):
    """The slots are zero."""

    size_bytes: int


Call = Load | WarmUp | RunStep | StageWeights | SwapWeights | DiscardStaged | ZeroState
Answer = Done | Loaded | Stepped | Swapped | Zeroed | Failure


class Request(msgspec.Struct, frozen=True):
    """A numbered call."""

    number: int
    call: Call


class Reply(msgspec.Struct, frozen=True):
    """The answer to the call of that number, or progress on the way to it."""

    number: int
    answer: Answer | Progress


#: Number of the reply that says that a rank is ready.
READY = 0

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
