"""One request's state: plain data that the scheduler moves along."""

from __future__ import annotations

import enum
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from bundle.errors import KilnError
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.capture import InputCapture
from runtime_svc.engine.prompt_reports import PromptReport


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: a name, and the digest of the bytes that the name stands for when the request comes."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class StopConditions:
    """The conditions that end a sequence; `max_new_tokens` is at least 1.

    `stop_token_ids` include the bundle's own unless the request ignores them.
    """

    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()


class StallAction(enum.Enum):
    """What a sequence does while its client does not read; the API explains each."""

    ABORT = enum.auto()
    PAUSE = enum.auto()
    COALESCE = enum.auto()


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """What a sequence does while its client does not read; the call ends once a response has waited for `timeout_s`."""

    action: StallAction
    timeout_s: float


@dataclass(frozen=True)
class StallTimeouts:
    """The server's bounds on how long responses may wait for clients that do not read.

    Attributes:
        default_s: For clients that choose none; the longest for ABORT, and while others want what a request holds.
        max_s: The longest that a client may choose for PAUSE and COALESCE.
    """

    default_s: float = 30.0
    max_s: float = 300.0


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
    """How a sequence ended: STOP_STRING comes with the string that stopped it, STOP_TOKEN with the token.

    TIME, ABORTED and ERROR come with the error that the call ends with.
    """

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: KilnError | None = None


class BucketKey(NamedTuple):
    """An executable as usage reports it."""

    submodel: str
    bucket: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketUsage:
    """How often an executable ran for a sequence, and how many tokens its static shape wasted."""

    key: BucketKey
    steps: int
    padding_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a sequence; partial if it did not end by itself."""

    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    kv_blocks: int
    kv_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    buckets: tuple[BucketUsage, ...]


@dataclass(slots=True)
class Timeline:
    """When things happened, in seconds of the event loop's clock; None until they do."""

    arrived_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    newest_token_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True)
class SessionLimits:
    """The server's bounds on sessions of one deployment. A caller at one of them loses the session unused for longest.

    A session is kept for `default_ttl_s` after its last request, or as long as its client chooses, up to `max_ttl_s`.
    """

    default_ttl_s: float = 600.0
    max_ttl_s: float = 3600.0
    max_sessions: int = 1024
    max_caller_sessions: int = 64


@dataclass(eq=False, slots=True)
class Session:
    """What requests continue one after the other: the KV cache keeps their keys and values in between.

    Attributes:
        owner: Who uses it; no other caller finds it.
        last_used_s: When its last request came or ended, in seconds of the event loop's clock.
        user: Its request that has not ended; None between requests.
        prefix_root: That of the request that computed `token_ids`, see `SessionKeeper.find_prefix_root`.
        token_ids: Tokens whose keys and values the cache keeps for it, from position 0; none while a request runs.
        num_written: Positions that steps of its requests may have written since one began at position 0.
    """

    owner: str
    session_id: str
    ttl_s: float
    last_used_s: float
    user: Request | None = None
    prefix_root: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    num_written: int = 0

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose keys and values the cache holds for it, or for its request that runs."""
        return len(self.token_ids) or (0 if self.user is None else self.user.num_computed_tokens)

    @property
    def expires_s(self) -> float | None:
        """When it ends unless it is used; None while a request uses it."""
        return self.last_used_s + self.ttl_s if self.user is None else None


class AllowedTokens(Protocol):
    """The tokens that the constraint of a sequence allows.

    Attributes:
        mask: Those that may come behind the forced ones, as `text.constraint.NextTokens` has them; None while that is
            being found out, and then none is forced.
        forced: The tokens that come next, since it allows no others.
    """

    mask: bytes | None
    forced: list[int]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sequence on its way; a call that wants several has a request for each.

    There are no phases: `num_computed_tokens` catches up with `num_tokens`, by a prompt, a part of one, or one token.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    timeline: Timeline
    #: Its number among the sequences of its call, which have one `request_id`.
    sequence_index: int = 0
    #: What only the sequences of its call have, which share the prompt's blocks; empty if it is the only one.
    call_key: bytes = b""
    #: Tokens that were cut from the prompt's beginning.
    num_truncated_tokens: int = 0
    #: Alternatives reported with each token; None reports no probabilities.
    top_logprobs: int | None = None
    #: Report all logits with each token.
    wants_logits: bool = False
    #: What it tells of its prompt, if the client wants that.
    report: PromptReport | None = None
    #: What becomes of it while its client does not read; None for what the server does by default.
    stall: StallPolicy | None = None
    #: The principal whose call it is; empty if none is known.
    owner: str = ""
    #: Requests with different salts share no part of the KV cache.
    cache_salt: str = ""
    #: The LoRA adapter that computes it beside the model, if it names one.
    adapter: Adapter | None = None
    #: The slot of its adapter in the ranks while it runs, see `AdapterSlots`; None without an adapter.
    adapter_slot: int | None = None
    #: Epoch of the weights that compute it, see `Scheduler.begin_epoch`.
    weight_epoch: int = 0
    #: The session that it continues, if the client names one.
    session: Session | None = None
    #: What its text must match, if it must; it stands still while its next mask is being found.
    constrained: AllowedTokens | None = None
    #: Whether its mask may come while a step computes it, which then leaves its token to be picked.
    is_awaited: bool = False
    #: Takes the inputs of its steps, if the client wants them.
    capture: InputCapture | None = None
    output_token_ids: list[int] = field(default_factory=list)
    #: Tokens, from the first on, whose keys and values are in the KV cache.
    num_computed_tokens: int = 0
    #: Positions that have been written where the KV cache holds it, also those behind its tokens, for a session.
    num_written: int = 0
    #: Of its prompt, the tokens that the KV cache held when it started.
    num_cached_tokens: int = 0
    #: The most blocks of the KV cache that it has held and given back.
    num_kv_blocks: int = 0
    #: Set while the client reads too slowly; the request keeps its part of the KV cache.
    is_paused: bool = False
    #: While it has fewer tokens, no other request runs beside it; see `suspects`.
    num_tokens_alone: int = 0
    #: How long it was paused, the pause that lasts apart.
    paused_s: float = 0.0
    #: How the request ended; only the first cause sets it.
    finish: Finish | None = None
    bucket_steps: Counter[BucketKey] = field(default_factory=Counter)
    bucket_padding: Counter[BucketKey] = field(default_factory=Counter)
    #: Whether its next step needs to know the token of the one before, so that none can be called ahead.
    needs_newest_token: bool = field(init=False)

    def __post_init__(self) -> None:
        self.needs_newest_token = self.sampling.counts_tokens

    @property
    def call_id(self) -> tuple[str, str]:
        """What tells its call from all others that have not ended: request ids are unique within an owner."""
        return self.owner, self.request_id

    @property
    def adapter_digest(self) -> str | None:
        """What its keys, values and tokens depend on besides the model; None without an adapter."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.stop.max_new_tokens - len(self.output_token_ids)

    @property
    def stands_still(self) -> bool:
        """Whether no step may compute it now."""
        return self.is_paused or (self.lacks_mask and not self.is_awaited)

    @property
    def lacks_mask(self) -> bool:
        """Whether the tokens that its constraint allows next are being found."""
        return self.constrained is not None and self.constrained.mask is None

    @property
    def known_tokens(self) -> Sequence[int]:
        """The next tokens that need no step: those that are forced, unless a step has to give numbers with each."""
        if self.constrained is None or self.top_logprobs is not None or self.wants_logits:
            return ()
        return self.constrained.forced

    @property
    def lacks_report(self) -> bool:
        """Whether a step that computes its prompt has to say something of it yet."""
        return self.report is not None and bool(self.report.names)

    @property
    def runs_alone(self) -> bool:
        """Whether no other request may run beside it now. One that its client pauses holds up none."""
        return self.num_tokens < self.num_tokens_alone and not self.is_paused

    def fan_out(self, count: int) -> tuple[Request, ...]:
        """Returns the sequences of a call that wants `count` of them for this request's prompt; it is the first.

        Each has a seed of its own, the request's plus its index modulo 2**64, so that a call with that seed repeats it.
        More than one only without session and capture, before anything is computed.
        """
        if count == 1:
            return (self,)
        assert self.session is None, "a session goes on from one sequence"
        assert self.capture is None, "a capture has the steps of one sequence"
        self.call_key = secrets.token_bytes(16)
        others = (
            replace(
                self,
                sequence_index=index,
                # One sequence tells of the prompt of all.
                report=None,
                sampling=replace(self.sampling, seed=(self.sampling.seed + index) % (1 << 64)),
                timeline=Timeline(self.timeline.arrived_s),
                output_token_ids=[],
                bucket_steps=Counter(),
                bucket_padding=Counter(),
            )
            for index in range(1, count)
        )
        return (self, *others)

    def tokens_at(self, start: int, count: int) -> list[int]:
        """Tokens from position `start` on, `count` of them or as many as there are."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if start >= num_prompt_tokens:
            start -= num_prompt_tokens
            return self.output_token_ids[start : start + count]
        # Of a block of the prompt, the output is not touched: the KV manager asks for each block of long sequences.
        tokens = self.prompt_token_ids[start : start + count]
        return [*tokens, *self.output_token_ids[: count - len(tokens)]]

    def take(self, token_ids: Sequence[int]) -> tuple[list[int], Finish | None]:
        """Appends new tokens up to one that ends it; returns those, and how it ends, which is None if it goes on."""
        taken: list[int] = []
        for token_id in token_ids:
            taken.append(token_id)
            self.output_token_ids.append(token_id)
            if token_id in self.stop.stop_token_ids:
                return taken, Finish(FinishReason.STOP_TOKEN, stop_token_id=token_id)
            if self.num_missing_tokens <= 0:
                return taken, Finish(FinishReason.LENGTH)
        return taken, None

    def drop_newest(self, count: int) -> None:
        """Takes back its newest tokens: they came with one that ends it."""
        del self.output_token_ids[len(self.output_token_ids) - count :]
        self.num_computed_tokens = min(self.num_computed_tokens, self.num_tokens)

    def usage(self) -> Usage:
        """Returns the cost of the request until it ended. A stage that it did not reach took no time."""
        timeline = self.timeline
        assert timeline.ended_s is not None
        started_s = timeline.ended_s if timeline.started_s is None else timeline.started_s
        first_token_s = timeline.ended_s if timeline.first_token_s is None else timeline.first_token_s
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            cached_prompt_tokens=self.num_cached_tokens,
            generated_tokens=len(self.output_token_ids),
            kv_blocks=self.num_kv_blocks,
            kv_tokens=self.num_computed_tokens,
            queue_s=started_s - timeline.arrived_s,
            prefill_s=first_token_s - started_s,
            decode_s=timeline.ended_s - first_token_s,
            buckets=tuple(
                BucketUsage(key, steps, self.bucket_padding[key]) for key, steps in self.bucket_steps.items()
            ),
        )

    def claim_finish(self, finish: Finish, now_s: float) -> bool:
        """Ends the request unless it has ended; tells whether this call did."""
        if self.finish is not None:
            return False
        self.finish = finish
        self.timeline.ended_s = now_s
        return True
