"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime_svc.engine.request import SessionLimits, StallTimeouts


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """How long running sequences may wait for a chunk of a prompt.

    Attributes:
        max_tokens: Tokens of a row that the chunk has at most, if it need not be a whole bucket. On two cores a model
            of 1 B parameters computes as many as the default in about three seconds, so runtimes whose streams must not
            wait for as long state less, or a target.
        target_s: Time between two tokens of a sequence, the chunk and the step of tokens behind it included, that
            chunks are chosen for; None for chunks as large as `max_tokens` allows.
    """

    max_tokens: int = 256
    target_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of an engine, and a switch.

    Attributes:
        queue_capacity: Requests that may wait beyond those that can start at once. Each sequence of a call counts.
        stream_capacity: Events of a sequence that may wait for a slow client before it is paused.
        async_scheduling: Call a step while the previous one runs, if it lacks only the tokens of that one. Tokens are
            the same without.
    """

    queue_capacity: int = 256
    max_call_sequences: int = 16
    stream_capacity: int = 64
    stall_timeouts: StallTimeouts = field(default_factory=StallTimeouts)
    chunks: ChunkLimits = field(default_factory=ChunkLimits)
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    async_scheduling: bool = True
