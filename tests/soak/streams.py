"""One Generate call of a soak: what a client saw of it, and what is wrong with that."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from kiln.runtime.v1 import generation_pb2 as pb

from tests.servers.answers import reason_of


@dataclass
class Stream:
    """A call from its start to its end, as its client saw it.

    Attributes:
        behaviour: Name of what the client did.
        deployment_id: Who was asked.
        prompt: Name of the prompt; empty if the answer is not compared.
        count: Tokens that a whole answer has.
        reasons: Reasons with which the behaviour itself may end the call, OK aside.
        num_sequences: Answers that a whole call has, one for each sequence.
    """

    behaviour: str
    deployment_id: str
    prompt: str
    count: int
    reasons: frozenset[str]
    num_sequences: int = 1
    begun_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    code: str = ""
    reason: str = ""
    #: Whether the client ended the call itself, so that no terminal event is owed.
    has_left: bool = False
    numbers: list[int] = field(default_factory=list)
    #: Of each event, its kind and the index of its sequence.
    kinds: list[tuple[str, int]] = field(default_factory=list)
    #: By sequence, epoch and id of each token.
    answers: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    #: The newest terminal event.
    finished: pb.Finished | None = None

    async def events(self, call: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Notes the events of a call and passes them on; notes how the call ends, and never raises its error."""
        try:
            async for event in call:
                self._note(event)
                yield event
            self.code = "OK"
        except grpc.aio.AioRpcError as error:
            self.code, self.reason = error.code().name, reason_of(error)
        except asyncio.CancelledError:
            # That of the call, unless the client's own task is cancelled, which cancels the call too.
            task = asyncio.current_task()
            if not call.cancelled() or (task is not None and task.cancelling()):
                raise
            self.code = "CANCELLED"

    async def read(self, call: Any) -> None:
        """Reads a call to its end."""
        async for _ in self.events(call):
            pass

    @property
    def end(self) -> str:
        """Code and reason, as the table has them."""
        return f"{self.code} {self.reason}".strip()

    def find_faults(self) -> Iterator[str]:
        """What breaks the contract of the stream, whatever its end."""
        if self.numbers != [*range(len(self.numbers))]:
            yield f"its sequence numbers are {self.numbers[:8]}…"
        if self.kinds and self.kinds[0] != ("accepted", 0):
            yield f"its first event is {self.kinds[0][0]}"
        ended = {index for kind, index in self.kinds if kind == "finished"}
        for sequence in ended:
            own = [kind for kind, index in self.kinds if index == sequence]
            if own.index("finished") != len(own) - 1:
                yield "its terminal event is not the one last event"
        lacks_end = len(ended) != self.num_sequences
        if self.code == "OK":
            if lacks_end:
                yield "it ended OK without a terminal event"
            for sequence in ended:
                if len(self.answers[sequence]) != self.count:
                    yield f"it ended OK with {len(self.answers[sequence])} of {self.count} tokens"
        elif self.kinds and lacks_end and not self.has_left and self.reason != "CLIENT_STALLED":
            yield f"it ended {self.end} without a terminal event"

    def _note(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event") or "nothing"
        self.numbers.append(event.sequence_number)
        self.kinds.append((kind, event.sequence_index))
        self.answers[event.sequence_index] += [(event.weight_epoch, token.id) for token in event.delta.tokens]
        if kind == "finished":
            self.finished = event.finished
