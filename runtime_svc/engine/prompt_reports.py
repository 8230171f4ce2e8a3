"""What a request tells of its prompt besides the tokens that follow it, gathered over the steps that compute it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import Any, Final, Literal, Protocol, get_args

import msgspec

from runtime_svc.engine.output_text import OutputText

#: Which hidden state of a prompt stands for it: that of its last token, or the mean of all.
Pooling = Literal["last", "mean"]
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)


class ReportedRow(msgspec.Struct, frozen=True):
    """A row of a step that computed `count` tokens of a prompt, from position `start` on, and what it says of them.

    In a row of tokens, they begin at the place `first`; `outputs` are as in `execution.step.StepResult`.
    """

    row: int
    start: int
    count: int
    first: int
    outputs: Mapping[str, memoryview[Any]]

    def read(self, name: str) -> memoryview[Any]:
        """The numbers of an output [rows, …] that are the row's."""
        values: Any = self.outputs[name]
        width = prod(values.shape[1:])
        flat: memoryview[Any] = values.cast("B").cast(values.format)
        return flat[self.row * width : (self.row + 1) * width]

    def read_tokens(self, name: str) -> memoryview[Any]:
        """The numbers of an output [rows, tokens, …] that are of the tokens."""
        width = prod((self.outputs[name].shape or ())[2:])
        return self.read(name)[self.first * width : (self.first + self.count) * width]


class PromptReport(Protocol):
    """What one request gathers."""

    @property
    def names(self) -> tuple[str, ...]:
        """The outputs that it takes of steps that compute its prompt, see `bundle.abi.outputs`; () once it has all."""

    @property
    def needs_all(self) -> bool:
        """Whether it lacks what steps say of all tokens of the prompt, those included that the KV cache holds."""

    def take(self, reported: ReportedRow) -> None:
        """Takes what a step says."""


class PromptLogprobs:
    """A prompt's tokens as the client gets them before the first new one, with log probabilities if it wants them."""

    def __init__(self, token_ids: Sequence[int], num_top: int | None) -> None:
        """Takes how many likeliest tokens are told in the place of each one; None: no probabilities."""
        self.token_ids = token_ids
        self.num_top = num_top
        #: The text of the tokens, none of which is pushed yet; until there is one, the client gets no tokens.
        self.text: OutputText | None = None
        #: Whether the client has got them.
        self.is_told = False
        self._num_known = len(token_ids) if num_top is None else 1
        num_told = 0 if num_top is None else len(token_ids)
        # By position. Nothing is said of the first token, which follows none.
        self._logprobs = array("f", bytes(4 * num_told))
        self._top_ids = array("i", bytes(4 * num_told * (num_top or 0)))
        self._top_logprobs = array("f", bytes(4 * num_told * (num_top or 0)))

    @property
    def names(self) -> tuple[str, ...]:
        """See `PromptReport`."""
        if not self.needs_all:
            return ()
        return ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs") if self.num_top else ("prompt_logprobs",)

    @property
    def needs_all(self) -> bool:
        """See `PromptReport`."""
        return self._num_known < len(self.token_ids)

    def take(self, reported: ReportedRow) -> None:
        """See `PromptReport`. A step says of a token what follows it."""
        count = min(reported.count, len(self.token_ids) - 1 - reported.start)
        begin = reported.start + 1
        self._logprobs[begin : begin + count] = array("f", reported.read_tokens("prompt_logprobs")[:count])
        if wanted := self.num_top:
            for name, own in (("prompt_top_ids", self._top_ids), ("prompt_top_logprobs", self._top_logprobs)):
                told = reported.read_tokens(name)
                width = len(told) // reported.count
                for index in range(count):
                    place = (begin + index) * wanted
                    own[place : place + wanted] = array(own.typecode, told[index * width : index * width + wanted])
        self._num_known = max(self._num_known, begin + count)

    def find_logprob(self, position: int) -> float | None:
        """The natural log probability of a token of the prompt behind those before it; None of the first one."""
        return self._logprobs[position] if position and self.num_top is not None else None

    def list_top(self, position: int) -> Sequence[tuple[int, float]]:
        """The likeliest tokens in place of one of the prompt, likeliest first, with their log probabilities."""
        if not position or not self.num_top:
            return ()
        places = slice(position * self.num_top, (position + 1) * self.num_top)
        return tuple(zip(self._top_ids[places], self._top_logprobs[places], strict=True))


class PromptEmbedding:
    """The hidden state that stands for a prompt."""

    def __init__(self, num_tokens: int, pooling: Pooling) -> None:
        self._num_tokens = num_tokens
        self._pooling = pooling
        self._num_summed = 0
        #: The numbers, once all steps are taken.
        self.values: Sequence[float] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """See `PromptReport`."""
        if self._num_summed == self._num_tokens:
            return ()
        return ("last_hidden",) if self._pooling == "last" else ("hidden_sum",)

    @property
    def needs_all(self) -> bool:
        """See `PromptReport`."""
        return self._pooling == "mean" and self._num_summed < self._num_tokens

    def take(self, reported: ReportedRow) -> None:
        """See `PromptReport`. A prompt may start anew."""
        end = reported.start + reported.count
        if self._pooling == "mean":
            own = reported.read("hidden_sum")
            sums = own if not reported.start else [one + two for one, two in zip(self.values, own, strict=True)]
            is_whole = end == self._num_tokens
            self.values = [one / end for one in sums] if is_whole else list(sums)
        elif end == self._num_tokens:
            self.values = list(reported.read("last_hidden"))
        self._num_summed = end


def normalize(values: Sequence[float]) -> list[float]:
    """Divides numbers by their Euclidean length; zeros stay as they are."""
    length = sqrt(sum(value * value for value in values)) or 1.0
    return [value / length for value in values]
