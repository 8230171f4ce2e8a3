"""Rows whose logits processors change: random parameters, and the inputs of executables that have them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
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


def draw_row(draw: random.Random, number: int, vocab_size: int) -> ProcessedRow:
    """A row of random parameters, with a prompt and an output that repeat themselves."""
    prompt, output = ([draw.randrange(10) for _ in range(draw.randint(*span))] for span in ((1, 12), (0, 8)))
    sampling = draw_sampling(draw, vocab_size)
    ends = (2, 5) if len(output) < sampling.min_new_tokens else ()
    mask = None
    if draw.random() < 0.35:
        allowed = {draw.randrange(vocab_size) for _ in range(draw.choice((1, 5, 30)))}
        mask = sum(1 << token for token in allowed).to_bytes(4 * -(-vocab_size // 32), "little")
    return ProcessedRow(number, sampling, array("i", prompt).tobytes(), array("i", output).tobytes(), ends, mask)


def change_row(row: ProcessedRow, vocab_size: int) -> tuple[RowChanges, array[int]]:
    """What the engine makes of a row: its changes, and its mask."""
    output = array("i", row.generated)
    changes = RowChanges(row.sampling, array("i", row.prompt), vocab_size)
    changes.advance(output)
    return changes, changes.make_mask(len(output), row.ends, row.mask)


def make_changes(rows: Sequence[ProcessedRow], vocab_size: int) -> dict[str, Tensor]:
    """The inputs of processors of rows, with room for pairs of the whole vocabulary."""
    symbols = {"R": len(rows), "B": vocab_size, "W": -(-vocab_size // 32)}
    tensors: dict[str, Tensor] = {}
    for one in INPUTS.values():
        if one.flag in (PROCESSORS, "cuts"):
            shape = one.shape(symbols)  # type: ignore[arg-type]
            values = torch.tensor(one.idle_values(shape, {}), dtype=getattr(torch, one.dtype)).view(shape)
            tensors[one.name] = values
    for number, row in enumerate(rows):
        changes, mask = change_row(row, vocab_size)
        for name, values in {**changes.pairs, "token_bitmask": mask, "cuts": changes.cuts}.items():
            tensors[name][number, : len(values)] = torch.tensor(values, dtype=tensors[name].dtype)
    return tensors
