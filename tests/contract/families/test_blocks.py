"""KV caches of blocks, and prompts that are computed in chunks, in blocks and in slots, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bundle.abi.submodels import SubmodelName
from tests.checkpoints.ropes import ROPES
from tests.checkpoints.tiny_models import (
    GEOMETRIES,
    TOLERANCE,
    TinyModel,
    deviation,
    draw_tokens,
    write_tiny_model,
)
from tests.contract.families.numbers import make_stepper
from tests.ranks.stepping import Run, run_eagerly, run_exported

BUCKET = 16
#: What a sequence of up to 128 tokens holds: blocks of 16 in no order, or a slot.
BLOCKS = {0: (7, 2, 11, 0, 5, 9, 1, 8), 1: (3, 10, 4, 6)}
SLOTS = {0: (2,), 1: (0,)}
READING: dict[str, Any] = {"reads_context": True, "skips_idle": True}
LAYOUTS = {"blocks": READING | {"num_blocks": 12, "block_tokens": 16}, "slots": READING}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Sequences:
    """Two sequences side by side; each step computes tokens of one of them, in the row of its number."""

    def __init__(self, tiny: TinyModel, layout: str, make_run: Run = run_eagerly) -> None:
        self.stepper = make_stepper(tiny, make_run, ctx_batch_size=2, **LAYOUTS[layout])
        self.blocks = BLOCKS if layout == "blocks" else SLOTS
        self.tokens = {number: draw_tokens(100, seed=number) for number in self.blocks}
        self.tiny = tiny

    def check(self, submodel: SubmodelName, number: int, start: int, count: int) -> None:
        """Computes tokens of a sequence, and compares the logits behind the last one."""
        tokens, given = self.tokens[number], {}
        bucket = BUCKET if submodel == "context_encoding" else 128
        given[number] = (tokens[start : start + count], start, self.blocks[number])
        logits = self.stepper.run(submodel, bucket, given)["logits"][number]
        assert deviation(logits, self.tiny.logits(tokens[: start + count])[-1]) < TOLERANCE


@pytest.mark.parametrize("make_run", [run_eagerly, pytest.param(run_exported, marks=pytest.mark.slow)])
def test_chunks_continue_what_the_cache_holds(tiny: TinyModel, layout: str, make_run: Run) -> None:
    sequences = Sequences(tiny, layout, make_run)
    for number, start, count in ((0, 0, 16), (1, 0, 5), (0, 16, 7), (1, 5, 16), (0, 23, 16), (0, 39, 1)):
        sequences.check("context_encoding", number, start, count)
    for step in range(4):
        sequences.check("token_generation", 0, 40 + step, 1)
        sequences.check("token_generation", 1, 21 + step, 1)
    # A step of several tokens behind tokens that came one by one.
    sequences.check("context_encoding", 1, 25, 9)


def test_tokens_that_the_cache_holds_may_be_computed_again(tiny: TinyModel, layout: str) -> None:
    sequences = Sequences(tiny, layout)
    sequences.check("context_encoding", 0, 0, 16)
    sequences.check("context_encoding", 0, 9, 11)


@pytest.mark.parametrize("layout", ["blocks"])
def test_tokens_that_move_into_a_step_are_read_and_not_written(tiny: TinyModel, layout: str) -> None:
    sequences = Sequences(tiny, layout)
    sequences.check("context_encoding", 0, 0, 16)
    stepper, tokens = sequences.stepper, sequences.tokens[0]
    shared, before = BLOCKS[0][0], [tensor.clone() for tensor in stepper.state]
    given = {0: (tokens[9:20], 9, BLOCKS[0])}
    logits = stepper.run("context_encoding", BUCKET, given, num_moved=7)["logits"][0]
    assert deviation(logits, tiny.logits(tokens[:20])[-1]) < TOLERANCE
    assert all(torch.equal(old[shared], new[shared]) for old, new in zip(before, stepper.state, strict=True))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_chunks_of_a_long_prompt_are_rotated_as_the_whole(tmp_path: Path, kind: str, layout: str) -> None:
    """Frequencies depend on the length: a prompt of 40 tokens has those of 40 in its first chunk already."""
    attributes = {"rope_parameters": ROPES[kind], "max_position_embeddings": 24}
    tiny = write_tiny_model(tmp_path, GEOMETRIES["gqa-llama3-tied"] | attributes)
    stepper = make_stepper(tiny, **LAYOUTS[layout])
    tokens, places = draw_tokens(50), (BLOCKS if layout == "blocks" else SLOTS)[0]
    given = [
        *(("context_encoding", BUCKET, start, 8) for start in (0, 8, 16, 24, 32)),
        *(("token_generation", 128, start, 1) for start in range(40, 44)),
        # Generated tokens that are computed anew, beside the end of the prompt.
        ("context_encoding", BUCKET, 36, 10),
    ]
    expected = tiny.step_logits(tokens, 40)
    for submodel, bucket, start, count in given:
        row = {0: (tokens[start : start + count], start, places)}
        logits = stepper.run(submodel, bucket, row, num_prompt_tokens=40)["logits"][0]
        if start + count >= 40:
            assert deviation(logits, expected[start + count - 40]) < TOLERANCE
