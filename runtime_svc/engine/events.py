"""The events of a stream. They are msgspec structs, which are cheap, because every token makes several."""

from __future__ import annotations

import msgspec

from bundle.errors import KilnError
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.request import Finish, Usage


class Accepted(msgspec.Struct, frozen=True):
    """The request was queued."""

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    max_new_tokens: int
    num_truncated_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True):
    """An alternative token and the natural logarithm of its probability."""

    token_id: int
    text: str
    logprob: float


class GeneratedToken(msgspec.Struct, frozen=True):
    """One token; without text if it stopped the sequence. `logits` are f32 [vocab_size], None unless asked for."""

    token_id: int
    text: str
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]
    logits: memoryview[float] | None = None


class TokenDelta(msgspec.Struct, frozen=True):
    """Text and tokens since the previous event."""

    text: str
    tokens: tuple[GeneratedToken, ...]


class Finished(msgspec.Struct, frozen=True):
    """The end of a stream: the cost, and the file of captured inputs or the error that prevented it."""

    finish: Finish
    usage: Usage
    captured_inputs_path: str = ""
    capture_error: KilnError | None = None


Payload = Accepted | TokenDelta | Finished


class Event(msgspec.Struct, frozen=True):
    """One event: its place in the stream, the weight epoch that produced it, and the sequence that it belongs to."""

    sequence_number: int
    weight_epoch: int
    payload: Payload
    sequence_index: int = 0
