"""What a stream carries."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_svc.engine.request import Finish, SamplingParams
from runtime_svc.engine.usage import Usage


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was queued."""

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An alternative token and the natural logarithm of its probability."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token; without text where it stopped the sequence."""

    token_id: int
    text: str
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Text and tokens since the previous event."""

    text: str
    tokens: tuple[GeneratedToken, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end, with what it cost."""

    finish: Finish
    usage: Usage


Payload = Accepted | TokenDelta | Finished


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its place in the stream, and the weight epoch that produced it."""

    sequence_number: int
    weight_epoch: int
    payload: Payload
