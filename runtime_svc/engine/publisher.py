"""Turns new tokens into events, while the next step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from execution.step import StepResult
from runtime_svc.engine.events import Accepted, Finished, GeneratedToken, TokenDelta, TokenLogprob
from runtime_svc.engine.request import Finish, FinishReason, Request
from runtime_svc.engine.scheduler import ScheduledRow
from runtime_svc.engine.streams import OutputStream
from runtime_svc.engine.usage import usage_of


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
        """A token by itself."""


class TokenOutput(msgspec.Struct, frozen=True):
    """One token of one request that is not published yet. `logits` are f32 [vocab_size]."""

    request: Request
    token_id: int
    logprob: float | None
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]
    weight_epoch: int
    logits: memoryview[float] | None = None


def outputs_of(rows: Sequence[ScheduledRow], result: StepResult, weight_epoch: int) -> list[TokenOutput]:
    """What a step gave to each of its rows."""
    outputs = []
    for row in rows:
        wanted = row.request.top_logprobs
        logprobs = result.logprobs if wanted is not None else None
        outputs.append(
            TokenOutput(
                request=row.request,
                token_id=result.tokens[row.row][0],
                logprob=None if logprobs is None else logprobs[row.row],
                top_ids=result.top_ids[row.row][:wanted] if wanted and result.top_ids else (),
                top_logprobs=result.top_logprobs[row.row][:wanted] if wanted and result.top_logprobs else (),
                weight_epoch=weight_epoch,
                logits=_logits_of(result, row.row) if row.request.wants_logits else None,
            )
        )
    return outputs


def _logits_of(result: StepResult, row: int) -> memoryview[float] | None:
    """One row of a step's logits; views of several dimensions cannot be cut."""
    if result.logits is None:
        return None
    flat = result.logits.cast("B").cast("f")
    width = len(flat) // len(result.tokens)
    return flat[row * width : (row + 1) * width]


class SequencePublisher:
    """Writes the events of one request."""

    def __init__(self, request: Request, text: OutputText, stream: OutputStream) -> None:
        """Writes to `stream`, which nobody else may put into."""
        self.request = request
        self._text = text
        self.stream = stream

    def accept(self, weight_epoch: int) -> None:
        """The first event."""
        request = self.request
        accepted = Accepted(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            max_new_tokens=request.stop.max_new_tokens,
            num_truncated_tokens=request.num_truncated_tokens,
        )
        self.stream.put(accepted, weight_epoch)

    def publish(self, output: TokenOutput, *, is_last: bool) -> str | None:
        """Writes a token; returns the stop string that its text completed, None for no such end."""
        finish = self.request.finish
        is_stop_token = is_last and finish is not None and finish.reason is FinishReason.STOP_TOKEN
        text = "" if is_stop_token else self._text.push(output.token_id)
        stop_string = self._text.stop_string
        if is_last and stop_string is None:
            text += self._text.flush()
        token_text = "" if is_stop_token else self._text.token_text(output.token_id)
        alternatives = zip(output.top_ids, output.top_logprobs, strict=True)
        token = GeneratedToken(
            output.token_id,
            token_text,
            output.logprob,
            tuple(TokenLogprob(one, self._text.token_text(one), logprob) for one, logprob in alternatives),
            output.logits,
        )
        self.stream.put(TokenDelta(text, (token,)), output.weight_epoch)
        return stop_string

    def finish(self, finish: Finish, weight_epoch: int) -> None:
        """Writes text that is still held back, then the terminal event."""
        rest = self._text.flush()
        if rest:
            self.stream.put(TokenDelta(rest, ()), weight_epoch)
        self.stream.put(Finished(finish, usage_of(self.request)), weight_epoch)
