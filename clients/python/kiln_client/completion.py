"""Collects the events of a stream into whole generations."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from kiln.runtime.v1.generation_pb2 import Accepted, Finished, FinishReason, GenerateResponse, Token, Usage

from kiln_client.enums import enum_name
from kiln_client.errors import KilnError, StreamIncomplete, error_from_status


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a generation.

    Attributes:
        text: The generated text, without the stop string or stop token that ended it.
        tokens: The generated tokens, including a stop token; with log probabilities if the request asked for them.
        finish_reason: `stop_token`, `stop_string`, `length` or `time`.
        stop: The stop string or the id of the stop token that ended it; None if another reason ended it.
        weight_epoch: Weight epoch of the last event.
        accepted: The request as the server understood it: its id, the prompt's length, every sampling value.
        captured_inputs_path: File of captured inputs on the runtime's host; empty if there is none.
        prompt_text: Text of the prompt; empty unless the request asked for it or for its log probabilities.
        prompt_tokens: Tokens of the prompt, in the same cases; those of several sequences are with the first one.
        cumulative_logprob: Sum of the log probabilities of the tokens; None unless the request asked for them.
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
    prompt_text: str = ""
    prompt_tokens: tuple[Token, ...] = ()
    cumulative_logprob: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the generated tokens."""
        return [token.id for token in self.tokens]


@dataclass(slots=True)
class _Sequence:
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_texts: list[str] = field(default_factory=list)
    prompt_tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None
    weight_epoch: int = 0


class CompletionBuilder:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self._num_events = 0
        self._accepted: Accepted | None = None
        self._sequences: dict[int, _Sequence] = {}

    def add(self, event: GenerateResponse) -> None:
        """Adds the next event.

        Raises:
            StreamIncomplete: An event is missing before this one.
        """
        if event.sequence_number != self._num_events:
            raise StreamIncomplete(f"event {self._num_events} is missing, event {event.sequence_number} came")
        self._num_events += 1
        sequence = self._sequences.setdefault(event.sequence_index, _Sequence())
        sequence.weight_epoch = event.weight_epoch
        match event.WhichOneof("event"):
            case "accepted":
                self._accepted = event.accepted
            case "delta":
                sequence.texts.append(event.delta.text)
                sequence.tokens.extend(event.delta.tokens)
            case "prompt":
                sequence.prompt_texts.append(event.prompt.text)
                sequence.prompt_tokens.extend(event.prompt.tokens)
            case "finished":
                sequence.finished = event.finished

    def build(self) -> Completion:
        """Makes the completion of a stream of one sequence after the last event.

        Raises:
            StreamIncomplete: The stream lacked its first or its last event.
            ValueError: The stream has several sequences.
        """
        if len(self._sequences) > 1:
            raise ValueError(f"the stream has {len(self._sequences)} sequences; build_sequences makes them all")
        return self.build_sequence(0)

    def build_sequences(self) -> list[Completion]:
        """Makes the completion of each sequence after the last event, by index.

        Raises:
            StreamIncomplete: The stream lacked its first event, or the last one of a sequence.
        """
        return [self.build_sequence(index) for index in range(max(self._sequences, default=0) + 1)]

    def build_sequence(self, index: int) -> Completion:
        """Makes the completion of one sequence that has ended.

        Raises:
            StreamIncomplete: The stream lacked its first event, or the sequence its last one.
        """
        sequence = self._sequences.get(index, _Sequence())
        finished = sequence.finished
        if self._accepted is None or finished is None:
            missing = "accepted event" if self._accepted is None else "finished event"
            raise StreamIncomplete(f"no {missing}" if not index else f"no {missing} of sequence {index}")
        match finished.WhichOneof("matched_stop"):
            case "stop_string":
                stop: str | int | None = finished.stop_string
            case "stop_token_id":
                stop = finished.stop_token_id
            case _:
                stop = None
        return Completion(
            text="".join(sequence.texts),
            tokens=tuple(sequence.tokens),
            finish_reason=enum_name(FinishReason.DESCRIPTOR, finished.reason),
            stop=stop,
            usage=finished.usage,
            weight_epoch=sequence.weight_epoch,
            accepted=self._accepted,
            captured_inputs_path=finished.captured_inputs_path,
            capture_error=error_from_status(finished.capture_status) if finished.HasField("capture_status") else None,
            prompt_text="".join(sequence.prompt_texts),
            prompt_tokens=tuple(sequence.prompt_tokens),
            cumulative_logprob=finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
        )


async def collect(events: AsyncIterable[GenerateResponse]) -> Completion:
    """Reads a stream of one sequence to its end.

    Raises:
        KilnError: The stream has failed; StreamIncomplete if it ends early.
        ValueError: The stream has several sequences.
    """
    return (await _read(events)).build()


async def collect_sequences(events: AsyncIterable[GenerateResponse]) -> list[Completion]:
    """Reads a stream to its end; returns its sequences by index.

    Raises:
        KilnError: The stream has failed, as it does if one sequence has; StreamIncomplete if it ends early.
    """
    return (await _read(events)).build_sequences()


async def _read(events: AsyncIterable[GenerateResponse]) -> CompletionBuilder:
    builder = CompletionBuilder()
    async for event in events:
        builder.add(event)
    return builder
