"""One request's state: plain data that the scheduler moves along."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from bundle.errors import KilnError
from runtime_svc.engine.capture import InputCapture


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked, every default filled in.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Candidates kept; 0 keeps all that the bundle considers.
        top_p: Probability mass kept, in (0, 1].
        seed: Of the request's own random numbers, in [0, 2**64).
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a sequence.

    Attributes:
        max_new_tokens: The limit in force, at least 1.
        stop_strings: Text that ends generation.
        stop_token_ids: Tokens that end generation, the bundle's own included unless the request ignores them.
    """

    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()


class FinishReason(enum.Enum):
    """Why a sequence ended; the API explains each."""

    STOP_TOKEN = enum.auto()
    STOP_STRING = enum.auto()
    LENGTH = enum.auto()
    TIME = enum.auto()
    ABORTED = enum.auto()
    ERROR = enum.auto()


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    Attributes:
        reason: Why.
        stop_string: The string that stopped it, for STOP_STRING.
        stop_token_id: The token that stopped it, for STOP_TOKEN.
        error: What the call ends with, for TIME, ABORTED and ERROR.
    """

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: KilnError | None = None


class BucketKey(NamedTuple):
    """An executable as usage reports it."""

    submodel: str
    bucket: tuple[int, ...]


@dataclass(slots=True)
class Timeline:
    """When things happened, in seconds of the event loop's clock; None until they do."""

    arrived_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None


@dataclass(eq=False, slots=True)
class Request:
    """One sequence on its way.

    There are no phases: `num_computed_tokens` catches up with `num_tokens`, by a whole prompt or by one token.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    timeline: Timeline
    #: Tokens that were cut from the prompt's beginning.
    num_truncated_tokens: int = 0
    #: Alternatives reported with each token; None reports no probabilities.
    top_logprobs: int | None = None
    #: Report all logits with each token.
    wants_logits: bool = False
    #: Takes the inputs of its steps, where the client wants them.
    capture: InputCapture | None = None
    output_token_ids: list[int] = field(default_factory=list)
    #: Tokens whose keys and values are in the slot.
    num_computed_tokens: int = 0
    #: KV slot, None while waiting and after the end.
    slot: int | None = None
    #: Set while the client reads too slowly; the slot stays.
    is_paused: bool = False
    #: Set once, by whoever ends the request first.
    finish: Finish | None = None
    bucket_steps: Counter[BucketKey] = field(default_factory=Counter)
    bucket_padding: Counter[BucketKey] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.stop.max_new_tokens - len(self.output_token_ids)

    def claim_finish(self, finish: Finish, now_s: float) -> bool:
        """Ends the request unless it has ended; tells whether this call did."""
        if self.finish is not None:
            return False
        self.finish = finish
        self.timeline.ended_s = now_s
        return True
