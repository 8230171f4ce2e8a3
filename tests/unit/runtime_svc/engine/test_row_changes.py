"""What processors change, by inputs of executables and on the host."""

from __future__ import annotations

import random

import pytest
import torch

from execution.host_rows import change_row
from execution.logit_changes import change_logits
from execution.sampling_parameters import SamplingParams
from execution.step import ProcessedRow
from runtime_svc.engine.scheduler.row_changes import RowChanges
from tests.ranks.processed_rows import Asked, draw_asked, make_changes

VOCAB_SIZE = 70
SHARE = -(-VOCAB_SIZE // 3)
NUM_CASES = 1200


def test_logits_are_those_of_the_host_bit_by_bit() -> None:
    draw, generator = random.Random(5), torch.Generator().manual_seed(5)
    for _ in range(NUM_CASES):
        asked, logits = draw_asked(draw, VOCAB_SIZE), torch.randn(VOCAB_SIZE, generator=generator) * 5
        changes = make_changes([asked], VOCAB_SIZE)
        changed = change_logits(logits[None], changes, VOCAB_SIZE, None)[0]
        assert changed.equal(change_row(logits, asked.describe(VOCAB_SIZE))), asked
        parts = torch.nn.functional.pad(logits, (0, 3 * SHARE - VOCAB_SIZE)).split(SHARE)
        firsts = [torch.tensor([rank * SHARE], dtype=torch.int32) for rank in range(3)]
        of_ranks = [
            change_logits(part[None], changes, VOCAB_SIZE, first)[0] for part, first in zip(parts, firsts, strict=True)
        ]
        assert torch.cat(of_ranks)[:VOCAB_SIZE].equal(changed)


def test_changes_follow_the_output_token_by_token() -> None:
    draw = random.Random(6)
    for _ in range(100):
        asked = draw_asked(draw, VOCAB_SIZE)
        changes = RowChanges(asked.sampling, asked.prompt, VOCAB_SIZE)
        for count in range(len(asked.output) + 1):
            changes.advance(asked.output[:count])
        whole, mask = asked.change(VOCAB_SIZE)
        assert (changes.pairs, changes.make_mask(len(asked.output), asked.ends, asked.constraint)) == (
            whole.pairs,
            mask,
        )


def test_rows_that_ask_for_nothing_keep_their_logits() -> None:
    logits = torch.tensor([0.0, -0.0, -3.5, float("-inf"), 1e30]).repeat(14)[None]
    asked = Asked(SamplingParams())
    assert change_logits(logits, make_changes([asked], VOCAB_SIZE), VOCAB_SIZE, None).equal(logits)
    assert asked.describe(VOCAB_SIZE) == ProcessedRow(0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_shows_through_the_mask(value: float) -> None:
    """The host marks such rows before it changes them."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3] = value
    changes = make_changes([Asked(SamplingParams(allowed_token_ids=(5,)))], VOCAB_SIZE)
    assert change_logits(logits, changes, VOCAB_SIZE, None).amax().isnan()


@pytest.mark.parametrize(
    ("sampling", "counts"),
    [
        (SamplingParams(logit_bias={1: 2.0}, min_new_tokens=3, allowed_token_ids=(5,), forced_token_ids=(6,)), False),
        (SamplingParams(bad_words=((1,), (2,))), False),
        (SamplingParams(bad_words=((1,), (2, 3))), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=0.5), True),
        (SamplingParams(no_repeat_ngram_size=2), True),
    ],
)
def test_which_parameters_wait_for_the_newest_token(sampling: SamplingParams, counts: bool) -> None:
    assert sampling.counts_tokens is counts
