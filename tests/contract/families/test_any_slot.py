"""Rows that take any slot of the KV cache, and rows that are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, draw_tokens
from tests.contract.families.numbers import make_stepper
from tests.ranks.stepping import Run, run_eagerly, run_exported

#: Five slots and three rows.
SLOTS = 5
OPTIONS: dict[str, Any] = {"num_slots": SLOTS, "skips_idle": True}
#: As graphs for Neuron do.
COMPUTES_IDLE = OPTIONS | {"skips_idle": False}


@pytest.mark.parametrize("make_run", [run_eagerly, pytest.param(run_exported, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [OPTIONS, pytest.param(COMPUTES_IDLE, marks=pytest.mark.slow)], ids=["skips", "computes"]
)
def test_any_row_reads_any_slot(tiny: TinyModel, make_run: Run, options: dict[str, Any]) -> None:
    stepper = make_stepper(tiny, make_run, **options)
    sequences = {slot: draw_tokens(12, seed=slot) for slot in range(SLOTS)}
    lengths = {slot: 3 + slot for slot in sequences}
    for slot, tokens in sequences.items():
        stepper.prefill({slot: tokens[: lengths[slot]]})
    for slots in ((4, 1, 2), (0, 3), (2,), (1, 4, 0)):
        fed = {slot: (sequences[slot][lengths[slot]], lengths[slot]) for slot in slots}
        logits = stepper.decode(fed, packed=True)["logits"]
        for row, slot in enumerate(slots):
            lengths[slot] += 1
            assert deviation(logits[row], tiny.logits(sequences[slot][: lengths[slot]])[-1]) < TOLERANCE


def test_rows_behind_the_live_ones_write_nothing(tiny: TinyModel) -> None:
    stepper = make_stepper(tiny, **OPTIONS)
    before = [tensor.clone() for tensor in stepper.state]
    stepper.decode({1: (7, 5), 3: (8, 2)}, packed=True, live_rows=torch.tensor([1], dtype=torch.int32))
    for old, new in zip(before, stepper.state, strict=True):
        changed = (old != new).any(dim=3).any(dim=1)[:SLOTS].nonzero()
        assert changed.tolist() == [[1, 5]]


def test_idle_rows_and_padding_change_nothing_where_they_are_computed(tiny: TinyModel) -> None:
    """The last slot's first position is written beside them: slots have no row behind them, but a spare position."""
    stepper = make_stepper(tiny, **COMPUTES_IDLE)
    assert {tensor.shape[0] for tensor in stepper.state} == {SLOTS}
    for tensor in stepper.state:
        tensor.normal_()
    before = [tensor.clone() for tensor in stepper.state]
    stepper.decode({SLOTS - 1: (7, 0)}, packed=True)
    stepper.prefill({2: [5, 6, 7]})
    for old, new in zip(before, stepper.state, strict=True):
        changed = (old != new).any(dim=3).any(dim=1).nonzero()
        assert changed.tolist() == [[2, 0], [2, 1], [2, 2], [SLOTS - 1, 0]]
