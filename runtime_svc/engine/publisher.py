"""Turns new tokens into events, while the next step runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol, Self

import msgspec

from execution.step import StepResult
from runtime_svc.engine.events import Accepted, Finished, GeneratedToken, TokenDelta, TokenLogprob
from runtime_svc.engine.request import Finish, FinishReason, Request
from runtime_svc.engine.scheduler.plan import RowTokens
from runtime_svc.engine.streams import OutputStream


class OutputText(Protocol):
    """The text of one sequence, as its tokens arrive."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has met, None before."""

    def push(self, token_id: int) -> str:
        """Text that is certain now; nothing after a stop string."""

    def flush(self) -> str:
        """Text that was held back, at the end of the sequence."""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""


class StepOutcome(msgspec.Struct, frozen=True):
    """The result of a step. Every list has an entry for each row of the batch, and that one for each token of the row.

    Attributes:
        tokens: New tokens.
        logprobs: Their log probabilities; None unless the step asked for them, as below.
        top_ids: The most probable tokens in place of each.
        top_logprobs: Their log probabilities.
        logits: Logits that each token was picked from, f32 [vocab_size].
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None = None
    top_ids: Sequence[Sequence[Sequence[int]]] | None = None
    top_logprobs: Sequence[Sequence[Sequence[float]]] | None = None
    logits: Sequence[Sequence[memoryview[float]]] | None = None

    @classmethod
    def from_result(cls, result: StepResult) -> Self:
        """Takes the result of ranks, which have log probabilities and logits of one token a row."""
        if result.logprobs is None and result.logits is None:
            return cls(result.tokens)
        return cls(
            result.tokens,
            None if result.logprobs is None else [[one] for one in result.logprobs],
            None if result.top_ids is None else [[one] for one in result.top_ids],
            None if result.top_logprobs is None else [[one] for one in result.top_logprobs],
            None if result.logits is None else [[one] for one in _rows_of(result.logits, len(result.tokens))],
        )


class StepOutput(msgspec.Struct, frozen=True):
    """The tokens that requests took from a step, and the epoch of its weights."""

    rows: Sequence[RowTokens]
    outcome: StepOutcome
    weight_epoch: int


class SequencePublisher:
    """Writes the events of one request."""

    def __init__(self, request: Request, text: OutputText, stream: OutputStream) -> None:
        """Writes to `stream`, which has no other writer."""
        self.request = request
        self.text = text
        self.stream = stream

    def accept(self, weight_epoch: int) -> None:
        """Writes the first event."""
        request = self.request
        accepted = Accepted(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            max_new_tokens=request.stop.max_new_tokens,
            num_truncated_tokens=request.num_truncated_tokens,
        )
        self.stream.put(accepted, weight_epoch)

    def publish(self, new: RowTokens, outcome: StepOutcome, weight_epoch: int) -> str | None:
        """Writes the tokens that a step gave, as one event.

        The request loses the tokens behind the one whose text completes a stop string.

        Returns:
            The stop string; None if the text has not met one.
        """
        request, text, pieces, tokens = self.request, self.text, [], []
        finish, row, last_index = request.finish, new.row.row, len(new.token_ids) - 1
        for index, token_id in enumerate(new.token_ids):
            token_text = ""
            if index < last_index or finish is None or finish.reason is not FinishReason.STOP_TOKEN:
                pieces.append(text.push(token_id))
                token_text = text.token_text(token_id)
            tokens.append(
                GeneratedToken(
                    token_id,
                    token_text,
                    None if outcome.logprobs is None or request.top_logprobs is None else outcome.logprobs[row][index],
                    self._alternatives(outcome, row, index) if request.top_logprobs else (),
                    outcome.logits[row][index] if request.wants_logits and outcome.logits is not None else None,
                )
            )
            if text.stop_string is not None:
                del request.output_token_ids[len(request.output_token_ids) - (last_index - index) :]
                break
        if finish is not None and text.stop_string is None:
            pieces.append(text.flush())
        self.stream.put(TokenDelta("".join(pieces), tuple(tokens)), weight_epoch)
        return text.stop_string

    def finish(self, finish: Finish, weight_epoch: int) -> None:
        """Writes text that is still held back, then the terminal event."""
        rest = self.text.flush()
        if rest:
            self.stream.put(TokenDelta(rest, ()), weight_epoch)
        self.stream.put(Finished(finish, self.request.usage()), weight_epoch)

    def _alternatives(self, outcome: StepOutcome, row: int, index: int) -> tuple[TokenLogprob, ...]:
        """The most probable tokens in place of one, as many as the request wants: others may want more."""
        if outcome.top_ids is None or outcome.top_logprobs is None:
            return ()
        pairs = zip(outcome.top_ids[row][index], outcome.top_logprobs[row][index], strict=True)
        wanted = islice(pairs, self.request.top_logprobs)
        return tuple(TokenLogprob(one, self.text.token_text(one), logprob) for one, logprob in wanted)


def _rows_of(logits: memoryview[float], num_rows: int) -> list[memoryview[float]]:
    """Logits [rows, vocab_size] by row; views of several dimensions cannot be cut."""
    flat = logits.cast("B").cast("f")
    width = len(flat) // num_rows
    return [flat[row * width : (row + 1) * width] for row in range(num_rows)]
