"""The output of a call on its way to the client: bounded, and exactly one terminal event for each sequence.

New tokens become events while the next step runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Final, Self

import msgspec

from bundle.errors import KilnError
from execution.step import StepResult
from runtime_svc.engine.events import (
    Accepted,
    Event,
    Finished,
    GeneratedToken,
    Payload,
    PromptDelta,
    TokenDelta,
    TokenLogprob,
)
from runtime_svc.engine.output_text import OutputText
from runtime_svc.engine.prompt_reports import PromptLogprobs
from runtime_svc.engine.request import Finish, FinishReason, Request
from runtime_svc.engine.scheduler.plan import RowTokens

#: Tokens, alternatives and logits that one joined event may hold: some hundred kilobytes on the wire.
MAX_JOINED_VALUES: Final = 4096


class StepOutcome(msgspec.Struct, frozen=True):
    """The result of a step. Every list has an entry for each row of the batch, and that one for each token of the row.

    What the step did not ask for is None. `top_ids` has the most probable tokens in place of each new one, and `logits`
    what each new one was picked from, f32 [vocab_size].
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None = None
    top_ids: Sequence[Sequence[Sequence[int]]] | None = None
    top_logprobs: Sequence[Sequence[Sequence[float]]] | None = None
    logits: Sequence[Sequence[memoryview[float]]] | None = None

    @classmethod
    def from_result(cls, result: StepResult) -> Self:
        """Takes the result of ranks."""
        logits = None if result.logits is None else _split(result.logits)
        return cls(result.tokens, result.logprobs, result.top_ids, result.top_logprobs, logits)


class StepOutput(msgspec.Struct, frozen=True):
    """The tokens that requests took from a step."""

    rows: Sequence[RowTokens]
    outcome: StepOutcome


class SequencePublisher:
    """Writes the events of one request, under the epoch of its weights."""

    def __init__(self, request: Request, text: OutputText, stream: OutputStream) -> None:
        self.request = request
        self.text = text
        self.stream = stream
        self._sum_logprobs = 0.0

    def accept(self) -> None:
        """Writes the first event."""
        request = self.request
        accepted = Accepted(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            max_new_tokens=request.stop.max_new_tokens,
            num_truncated_tokens=request.num_truncated_tokens,
        )
        self._put(accepted)

    def publish(self, new: RowTokens, outcome: StepOutcome) -> str | None:
        """Writes the tokens that a step gave, as one event; returns the stop string that their text completes, or None.

        The request loses the tokens behind the one whose text completes a stop string.
        """
        self._publish_prompt()
        request, text, pieces, tokens = self.request, self.text, [], []
        finish, row, last_index = request.finish, new.row, len(new.token_ids) - 1
        for index, token_id in enumerate(new.token_ids):
            token_text, offset, logprob = "", text.num_chars, None
            if outcome.logprobs is not None and request.top_logprobs is not None:
                logprob = outcome.logprobs[row][index]
                self._sum_logprobs += logprob
            if index < last_index or finish is None or finish.reason is not FinishReason.STOP_TOKEN:
                pieces.append(text.push(token_id))
                token_text = text.token_text(token_id)
            tokens.append(
                GeneratedToken(
                    token_id,
                    token_text,
                    logprob,
                    self._alternatives(outcome, row, index) if request.top_logprobs else (),
                    outcome.logits[row][index] if request.wants_logits and outcome.logits is not None else None,
                    None if logprob is None else offset,
                )
            )
            if text.stop_string is not None:
                request.drop_newest(last_index - index)
                break
        if finish is not None and text.stop_string is None:
            pieces.append(text.flush())
        self._put(TokenDelta("".join(pieces), tuple(tokens)))
        return text.stop_string

    def finish(self, finish: Finish) -> None:
        """Writes text that is still held back, then the terminal event."""
        rest = self.text.flush()
        if rest:
            self._put(TokenDelta(rest, ()))
        total = None if self.request.top_logprobs is None else self._sum_logprobs
        self._put(Finished(finish, self.request.usage(), cumulative_logprob=total))

    def _put(self, payload: Payload) -> None:
        self.stream.put(payload, self.request.weight_epoch)

    def _publish_prompt(self) -> None:
        """Writes the tokens of the prompt, if the client wants them and has not got them: as many events as need be."""
        prompt = self.request.report
        if not isinstance(prompt, PromptLogprobs) or prompt.text is None or prompt.is_told:
            return
        prompt.is_told = True
        num_tokens, size = len(prompt.token_ids), max(1, MAX_JOINED_VALUES // (1 + (prompt.num_top or 0)))
        for start in range(0, num_tokens, size):
            self._put(PromptDelta(prompt, start, min(size, num_tokens - start)))

    def _alternatives(self, outcome: StepOutcome, row: int, index: int) -> tuple[TokenLogprob, ...]:
        """The most probable tokens in place of one, as many as the request wants: others may want more."""
        if outcome.top_ids is None or outcome.top_logprobs is None:
            return ()
        pairs = zip(outcome.top_ids[row][index], outcome.top_logprobs[row][index], strict=True)
        wanted = islice(pairs, self.request.top_logprobs)
        return tuple(TokenLogprob(one, self.text.token_text(one), logprob) for one, logprob in wanted)


class OutputStream:
    """Events of one sequence. The engine puts, one consumer iterates.

    A consumer that comes late gets the token deltas that wait as one event: one write to the client instead of many.

    `put` never waits: a stream that is full asks the engine to pause the request, so it exceeds its capacity by at most
    the events of the running step, and by the terminal event.
    """

    def __init__(
        self,
        capacity: int,
        *,
        on_drained: Callable[[], None],
        on_closed: Callable[[], None],
        counts_values: bool = False,
        stall_timeout_s: float | None = None,
    ) -> None:
        """Starts empty; `capacity` events may wait for the client.

        With `counts_values`, `MAX_JOINED_VALUES` values may wait, however many events they are. The consumer may let
        the client wait with reading for `stall_timeout_s`; None for the server's default.
        """
        self._capacity = capacity
        self._on_drained = on_drained
        self._on_closed = on_closed
        self._counts_values = counts_values
        self._events: deque[tuple[Payload, int]] = deque()
        # Values of all events that wait, while there are several: counting takes time, and most consumers are in time.
        self._num_values = 0
        self._arrived: asyncio.Future[None] | None = None
        #: Events that the consumer has taken; the next one has this number.
        self.num_taken = 0
        self.stall_timeout_s = stall_timeout_s
        #: The terminal event's payload, once there is one; it is here also if the consumer leaves without taking it.
        self.finished: Finished | None = None

    @property
    def ends(self) -> Sequence[Finished]:
        """The terminal payloads of sequences that have ended, by index."""
        return () if self.finished is None else (self.finished,)

    @property
    def error(self) -> KilnError | None:
        """What the call ends with once the last event is taken; None if that is no error."""
        return None if self.finished is None else self.finished.finish.error

    @property
    def has_waiting(self) -> bool:
        """Whether an event waits, so that the consumer gets one at once."""
        return bool(self._events)

    @property
    def begins_with_prompt(self) -> bool:
        """Whether the event that waits longest has tokens of the prompt."""
        return bool(self._events) and isinstance(self._events[0][0], PromptDelta)

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly."""
        if len(self._events) < self._capacity:
            return False
        return not self._counts_values or self._num_values >= MAX_JOINED_VALUES

    def put(self, payload: Payload, weight_epoch: int) -> None:
        """Appends an event; nothing may follow `Finished`."""
        assert self.finished is None, "an event after the terminal one"
        if isinstance(payload, Finished):
            self.finished = payload
        if self._events:
            if len(self._events) == 1:
                self._num_values = _count_values(self._events[0][0])
            self._num_values += _count_values(payload)
        self._events.append((payload, weight_epoch))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def announce(self, arrived: asyncio.Future[None]) -> None:
        """Lets the next event that is put resolve a future, if no other has."""
        self._arrived = arrived

    def close(self) -> None:
        """The consumer leaves: the request ends unless it has ended. Harmless when repeated."""
        self._on_closed()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.finished is not None:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        was_full = self.is_full
        payload, weight_epoch = self._events.popleft()
        if self._events:
            payload = self._join_waiting(payload, weight_epoch)
        else:
            self._num_values = 0
        event = Event(self.num_taken, weight_epoch, payload)
        self.num_taken += 1
        if was_full and not self.is_full:
            self._on_drained()
        return event

    def _join_waiting(self, first: Payload, weight_epoch: int) -> Payload:
        """Joins a payload that was taken with the token deltas of the same epoch that wait behind it."""
        num_values = _count_values(first)
        joined = [first] if isinstance(first, TokenDelta) else []
        while joined and self._events:
            payload, epoch = self._events[0]
            if epoch != weight_epoch or not isinstance(payload, TokenDelta):
                break
            num_more = _count_values(payload)
            if num_values + num_more > MAX_JOINED_VALUES:
                break
            joined.append(payload)
            num_values += num_more
            self._events.popleft()
        self._num_values -= num_values
        if len(joined) < 2:
            return first
        return TokenDelta(
            "".join([delta.text for delta in joined]), tuple(chain.from_iterable([delta.tokens for delta in joined]))
        )


class MergedStream:
    """Events of several sequences of one call as one stream, numbered as the consumer takes them.

    Each sequence has its own bounds. Those that have events take turns; the events of one keep their order.
    """

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._streams = streams
        self._num_taken = 0
        self._newest_index = -1
        #: What the call ends with once the last event is taken: that of the first `Finished` event that has an error.
        self.error: KilnError | None = None

    @property
    def ends(self) -> Sequence[Finished]:
        """The terminal payloads of sequences that have ended, by index."""
        return [stream.finished for stream in self._streams if stream.finished is not None]

    @property
    def stall_timeout_s(self) -> float | None:
        """See `OutputStream`; it is the same for all."""
        return self._streams[0].stall_timeout_s

    def close(self) -> None:
        """The consumer leaves: sequences end unless they have ended. Harmless when repeated."""
        for stream in self._streams:
            stream.close()

    def __aiter__(self) -> MergedStream:
        return self

    async def __anext__(self) -> Event:
        while (index := self._find_waiting()) is None:
            if all(stream.finished is not None for stream in self._streams):
                raise StopAsyncIteration
            arrived = asyncio.get_running_loop().create_future()
            for stream in self._streams:
                stream.announce(arrived)
            await arrived
        event = await anext(self._streams[index])
        if isinstance(event.payload, Finished) and self.error is None:
            self.error = event.payload.finish.error
        merged = Event(self._num_taken, event.weight_epoch, event.payload, index)
        self._newest_index = index
        self._num_taken += 1
        return merged

    def _find_waiting(self) -> int | None:
        """Returns the sequence whose turn it is, of those that have events; None if none has.

        The first one has the prompt, which comes before tokens of any.
        """
        if self._streams[0].begins_with_prompt:
            return 0
        count = len(self._streams)
        turns = ((self._newest_index + step) % count for step in range(1, count + 1))
        return next((index for index in turns if self._streams[index].has_waiting), None)


def _count_values(payload: Payload) -> int:
    """Returns the tokens, alternatives and logits of an event."""
    if isinstance(payload, PromptDelta):
        return payload.count * (1 + (payload.prompt.num_top or 0))
    if not isinstance(payload, TokenDelta):
        return 0
    return sum(
        [1 + len(token.top_logprobs) + (0 if token.logits is None else len(token.logits)) for token in payload.tokens]
    )


def _split(logits: memoryview[float]) -> list[list[memoryview[float]]]:
    """Logits [rows, vocab_size] or [rows, tokens, vocab_size] by row and token; views of several dimensions cannot be
    cut.
    """
    assert logits.shape is not None, "logits of rows"
    flat, (num_rows, *_, width) = logits.cast("B").cast("f"), logits.shape
    of_tokens = [flat[start : start + width] for start in range(0, len(flat), width)]
    num_tokens = len(of_tokens) // num_rows
    return [of_tokens[start : start + num_tokens] for start in range(0, len(of_tokens), num_tokens)]
