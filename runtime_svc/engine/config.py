"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from runtime_svc.engine.request import StallTimeouts

#: Where the server sets none. On two cores a model of 1 B parameters computes so many tokens in about three seconds, so
#: deployments whose streams must not wait for as long compile smaller buckets and set less.
DEFAULT_CHUNK_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of an engine, and a switch.

    Attributes:
        queue_capacity: Requests that may wait beyond those that can start at once.
        stream_capacity: Events that may wait for a slow client before its request is paused.
        stall_timeouts: How long responses may wait for clients that do not read.
        max_chunk_tokens: Tokens of a prompt that a step may compute while running sequences wait for their next token,
            if an executable is compiled for so few.
        async_scheduling: Call a step while the previous one runs, if it lacks only the tokens of that one. Tokens are
            the same without.
    """

    queue_capacity: int = 256
    stream_capacity: int = 64
    stall_timeouts: StallTimeouts = field(default_factory=StallTimeouts)
    max_chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    async_scheduling: bool = True
