"""Rows whose logits processors change: random parameters, and the inputs of executables that have them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bundle.abi.inputs import INPUTS, PROCESSORS
from execution.sampling_parameters import SamplingParams
from execution.step import ProcessedRow
from runtime_svc.engine.scheduler.row_changes import RowChanges


def draw_sampling(draw: random.Random, vocab_size: int) -> SamplingParams:
    """Some of the processors, each with values that matter in a small vocabulary."""

    def token() -> int:
        return draw.randrange(vocab_size)

    values: dict[str, Any] = {
        "logit_bias": lambda: {token(): draw.uniform(-100, 100) for _ in range(4)},
        "repetition_penalty": lambda: draw.uniform(0.1, 3),
        "frequency_penalty": lambda: draw.uniform(-2, 2),
        "presence_penalty": lambda: draw.uniform(-2, 2),
        "no_repeat_ngram_size": lambda: draw.randint(1, 3),
        "bad_words": lambda: tuple(tuple(token() for _ in range(draw.randint(1, 2))) for _ in range(20)),
        "min_new_tokens": lambda: draw.randint(1, 8),
        "allowed_token_ids": lambda: tuple({token() for _ in range(draw.choice((1, 30)))}),
        "forced_token_ids": lambda: (token(), token()),
        "min_p": lambda: draw.uniform(0, 0.5),
        "typical_p": lambda: draw.uniform(0.1, 1),
        "temperature": lambda: draw.choice((0.0, 0.7, 1.5)),
        "top_k": lambda: draw.choice((1, 5, 12)),
        "top_p": lambda: draw.uniform(0.5, 1),
    }
    return SamplingParams(**{name: make() for name, make in values.items() if draw.random() < 0.35})


@dataclass(frozen=True)
class Asked:
    """What a row asks for, and the tokens of its sequence; `ends` are not yet allowed."""

    sampling: SamplingParams
    prompt: Sequence[int] = (1,)
    output: Sequence[int] = ()
    ends: tuple[int, ...] = ()
    constraint: bytes | None = None

    def change(self, vocab_size: int) -> tuple[RowChanges, array[int] | None]:
        """What the engine makes of it: its changes, and its mask."""
        changes = RowChanges(self.sampling, self.prompt, vocab_size)
        changes.advance(self.output)
        return changes, changes.make_mask(len(self.output), self.ends, self.constraint)

    def describe(self, vocab_size: int, row: int = 0) -> ProcessedRow:
        """The same for the host."""
        changes, mask = self.change(vocab_size)
        return changes.describe(row, mask)


def draw_asked(draw: random.Random, vocab_size: int) -> Asked:
    """Random parameters, with a prompt and an output that repeat themselves."""
    prompt, output = ([draw.randrange(10) for _ in range(draw.randint(*span))] for span in ((1, 12), (0, 8)))
    sampling = draw_sampling(draw, vocab_size)
    ends = (2, 5) if len(output) < sampling.min_new_tokens else ()
    constraint = None
    if draw.random() < 0.35:
        allowed = {draw.randrange(vocab_size) for _ in range(draw.choice((1, 5, 30)))}
        constraint = sum(1 << token for token in allowed).to_bytes(4 * -(-vocab_size // 32), "little")
    return Asked(sampling, prompt, output, ends, constraint)


def make_changes(rows: Sequence[Asked], vocab_size: int) -> dict[str, Tensor]:
    """The inputs of processors of rows, with room for pairs of the whole vocabulary."""
    symbols = {"R": len(rows), "B": vocab_size, "W": -(-vocab_size // 32)}
    tensors: dict[str, Tensor] = {}
    for one in INPUTS.values():
        if one.flag in (PROCESSORS, "cuts"):
            shape = one.shape(symbols)  # type: ignore[arg-type]
            values = torch.tensor(one.idle_values(shape, {}), dtype=getattr(torch, one.dtype)).view(shape)
            tensors[one.name] = values
    for number, row in enumerate(rows):
        changes, mask = row.change(vocab_size)
        for name, values in changes.list_inputs(mask):
            tensors[name][number, : len(values)] = torch.tensor(values, dtype=tensors[name].dtype)
    return tensors
