"""Collects the events of a stream into a whole generation."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass

from kiln.runtime.v1.generation_pb2 import Accepted, Finished, FinishReason, GenerateResponse, Token, Usage

from kiln_client.enums import enum_name
from kiln_client.errors import KilnError, StreamIncomplete
from kiln_client.status import error_from_status


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a generation.

    Attributes:
        text: The generated text, without the stop string or stop token that ended it.
        tokens: The generated tokens, including a stop token; with log probabilities if the request asked for them.
        finish_reason: `stop_token`, `stop_string`, `length` or `time`.
        stop: The stop string or the id of the stop token that ended it; None if another reason ended it.
        usage: Counts of tokens, and times.
        weight_epoch: Weight epoch of the last event.
        accepted: The request as the server understood it: its id, the prompt's length, every sampling value.
        captured_inputs_path: File of captured inputs on the runtime's host; empty if there is none.
        capture_error: Why the runtime could not write a file of captured inputs; None if it could or was not asked to.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    weight_epoch: int
    accepted: Accepted
    captured_inputs_path: str = ""
    capture_error: KilnError | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the generated tokens."""
        return [token.id for token in self.tokens]


class CompletionBuilder:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self._num_events = 0
        self._accepted: Accepted | None = None
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._finished: Finished | None = None
        self._weight_epoch = 0

    def add(self, event: GenerateResponse) -> None:
        """Adds the next event.

        Raises:
            StreamIncomplete: An event is missing before this one.
        """
        if event.sequence_number != self._num_events:
            raise StreamIncomplete(f"event {self._num_events} is missing, event {event.sequence_number} came")
        self._num_events += 1
        self._weight_epoch = event.weight_epoch
        match event.WhichOneof("event"):
            case "accepted":
                self._accepted = event.accepted
            case "delta":
                self._texts.append(event.delta.text)
                self._tokens.extend(event.delta.tokens)
            case "finished":
                self._finished = event.finished

    def build(self) -> Completion:
        """Makes the completion after the last event.

        Raises:
            StreamIncomplete: The stream lacked its first or its last event.
        """
        if self._accepted is None or self._finished is None:
            raise StreamIncomplete(f"no {'accepted' if self._accepted is None else 'finished'} event")
        match self._finished.WhichOneof("matched_stop"):
            case "stop_string":
                stop: str | int | None = self._finished.stop_string
            case "stop_token_id":
                stop = self._finished.stop_token_id
            case _:
                stop = None
        status = self._finished.capture_status
        return Completion(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=enum_name(FinishReason.DESCRIPTOR, self._finished.reason),
            stop=stop,
            usage=self._finished.usage,
            weight_epoch=self._weight_epoch,
            accepted=self._accepted,
            captured_inputs_path=self._finished.captured_inputs_path,
            capture_error=error_from_status(status) if self._finished.HasField("capture_status") else None,
        )


async def collect(events: AsyncIterable[GenerateResponse]) -> Completion:
    """Reads a stream to its end.

    Raises:
        KilnError: The stream has failed; StreamIncomplete if it ends early.
    """
    builder = CompletionBuilder()
    async for event in events:
        builder.add(event)
    return builder.build()
