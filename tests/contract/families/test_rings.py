"""Layers with a window over rings that they wrap around several times, against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bundle.abi.submodels import SubmodelName
from compiler_svc.trace.submodels import describe_state
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, draw_tokens
from tests.contract.families.numbers import make_stepper
from tests.ranks.stepping import Run, run_eagerly, run_exported

#: Of the geometries that are shown.
ATTRIBUTE = "sliding_window"
BUCKET, SLOTS, LENGTH = 16, 4, 120


class Sequences:
    """Sequences of 120 tokens that take any row; rings of 32 positions or more."""

    def __init__(self, tiny: TinyModel, make_run: Run = run_eagerly) -> None:
        options: Any = {"num_slots": SLOTS, "ctx_batch_size": 2, "reads_context": True, "skips_idle": True}
        self.stepper = make_stepper(tiny, make_run, context_buckets=(8, BUCKET), largest_step=BUCKET, **options)
        rings = [tensor for tensor in describe_state(self.stepper.spec).tensors if tensor.window]
        assert rings
        assert all(2 * tensor.num_positions < LENGTH for tensor in rings)
        self._tiny = tiny
        self.tokens: dict[int, list[int]] = {}
        self._expected: dict[int, torch.Tensor] = {}
        for slot in range(SLOTS):
            self.begin(slot, draw_tokens(LENGTH, seed=slot))

    def begin(self, slot: int, tokens: list[int]) -> None:
        """Says what a slot's sequence is from now on."""
        self.tokens[slot], self._expected[slot] = tokens, self._tiny.logits(tokens)

    def check(self, submodel: SubmodelName, bucket: int, rows: dict[int, tuple[int, int, int]]) -> None:
        """Computes tokens in one step and compares the logits behind each row's last one.

        Args:
            rows: By row, the slot, the position of the first token and how many there are.
        """
        given = {
            row: (self.tokens[slot][start : start + count], start, (slot,))
            for row, (slot, start, count) in rows.items()
        }
        logits = self.stepper.run(submodel, bucket, given)["logits"]
        for row, (slot, start, count) in rows.items():
            assert deviation(logits[row], self._expected[slot][start + count - 1]) < TOLERANCE


# `tests/parity` runs exported graphs, too.
@pytest.mark.parametrize("make_run", [run_eagerly, pytest.param(run_exported, marks=pytest.mark.slow)])
def test_sequences_wrap_around_their_rings(tiny: TinyModel, make_run: Run) -> None:
    """Whole buckets and parts of them, then single tokens, in other rows than slots and beside each other."""
    sequences = Sequences(tiny, make_run)
    for start in range(0, 80, BUCKET):
        sequences.check("context_encoding", BUCKET, {0: (3, start, BUCKET), 1: (1, start, BUCKET - 5)})
        sequences.check("context_encoding", 8, {1: (1, start + BUCKET - 5, 5)})
    for step in range(40):
        sequences.check("token_generation", 128, {0: (1, 80 + step, 1), 2: (3, 80 + step, 1)})


def test_slots_that_were_used_start_again(tiny: TinyModel) -> None:
    """As after a preemption, and for another sequence: what the ring still holds is of no use."""
    sequences = Sequences(tiny)
    for start in range(0, 96, BUCKET):
        sequences.check("context_encoding", BUCKET, {0: (2, start, BUCKET)})
    sequences.begin(2, sequences.tokens[0])
    sequences.check("context_encoding", 8, {0: (2, 0, 3)})
    for step in range(60):
        sequences.check("token_generation", 24 if step < 20 else 128, {1: (2, 3 + step, 1)})


def test_as_many_tokens_are_taken_back_as_the_state_says(tiny: TinyModel) -> None:
    sequences = Sequences(tiny)
    layout = describe_state(sequences.stepper.spec)
    most = layout.max_rewound_tokens
    assert most is not None
    assert most >= BUCKET
    for start in range(0, 96, BUCKET):
        sequences.check("context_encoding", BUCKET, {0: (2, start, BUCKET)})
    before = [tensor.clone() for tensor in sequences.stepper.state]
    # Other tokens from there on.
    kept = sequences.tokens[2][: 96 - most]
    sequences.begin(2, kept + draw_tokens(LENGTH - len(kept), seed=9))
    for step in range(20):
        sequences.check("token_generation", 128, {0: (2, len(kept) + step, 1)})
    sequences.stepper.state = before
    sequences.check("context_encoding", BUCKET, {0: (2, len(kept), BUCKET)})
    # One more, and the oldest key of the window is that of another position.
    sequences.stepper.state = before
    with pytest.raises(AssertionError):
        sequences.check("token_generation", 128, {0: (2, len(kept) - 1, 1)})


def test_padding_on_the_left_fills_rings_too(tiny: TinyModel) -> None:
    stepper = make_stepper(tiny, context_buckets=(BUCKET,), padding_side="left", largest_step=BUCKET)
    assert describe_state(stepper.spec).max_rewound_tokens
    tokens = draw_tokens(100)
    expected = tiny.logits(tokens)
    assert deviation(stepper.prefill({1: tokens[:11]})["logits"][0], expected[10]) < TOLERANCE
    for position in range(11, 100):
        logits = stepper.decode({1: (tokens[position], position)})["logits"]
        assert deviation(logits[1], expected[position]) < TOLERANCE


def test_windows_that_nothing_is_shorter_than_keep_all_positions(tiny: TinyModel) -> None:
    spec = tiny.spec(largest_step=BUCKET, max_length=32, skips_idle=True)
    assert describe_state(spec) == describe_state(replace(spec, largest_step=0))


def test_graphs_depend_on_their_rings(tiny: TinyModel) -> None:
    """Plans find executables by this: a bucket more that makes rings no longer changes nothing."""
    spec = tiny.spec(largest_step=BUCKET)
    assert spec.to_json() == replace(spec, largest_step=BUCKET + 1).to_json()
    assert spec.to_json() != replace(spec, largest_step=4 * BUCKET).to_json()
