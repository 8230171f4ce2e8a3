"""Caches that keep keys and values in bytes, against transformers with a cache of its own that does the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from torch import Tensor

from compiler_svc.models.registry import describe_model
from compiler_svc.models.state import KeptAs
from compiler_svc.models.transforms import ModelChanges
from compiler_svc.trace.submodels import describe_state
from tests.checkpoints.cache_scales import add_cache_scales
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.tiny_models import TOLERANCE, deviation, draw_tokens, write_tiny_model
from tests.ranks.stepping import Stepper
from tests.ranks.threads import run_ranks

BUCKET: Final = 16
#: Prompts at the edges of a bucket, two of them in one step; tokens follow each.
LENGTHS: Final = ((16, 15), (1, 16))
NUM_TOKENS: Final = 44
LLAMA: Final = ("LlamaForCausalLM", "gqa-llama3-tied")
CAST: Final = KeptAs(dtype="float8_e4m3fn")


@dataclass(frozen=True)
class Case:
    """A cache: how it keeps what, its layout, and the blocks or slots of two sequences."""

    kept: KeptAs
    options: dict[str, Any] = field(default_factory=dict)
    places: tuple[tuple[int, ...], ...] = ((2,), (0,))
    model: tuple[str, str] = LLAMA
    tp_degree: int = 1


BLOCKS: Final = Case(CAST, {"num_blocks": 12, "block_tokens": 16}, ((7, 2, 11), (0, 5, 9)))
RINGS: Final = Case(CAST, {"largest_step": BUCKET}, ((1,), (2,)), ("MistralForCausalLM", "window"))
CASES: Final = {
    "slots": Case(CAST),
    "blocks": BLOCKS,
    "rings": RINGS,
    "slots, float8 by heads": Case(KeptAs(dtype="float8_e4m3fn", key_scales="head", value_scales="tensor")),
    "blocks, int8 by channels": replace(BLOCKS, kept=KeptAs(dtype="int8", key_scales="channel", value_scales="head")),
    "rings, int8": replace(RINGS, kept=KeptAs(dtype="int8", key_scales="tensor", value_scales="channel")),
    "ranks, int8 by heads": Case(KeptAs(dtype="int8", key_scales="head", value_scales="head"), tp_degree=4),
}


class RoundingCache(transformers.DynamicCache):
    """Gives back what bytes leave of keys and values."""

    def __init__(self, config: Any, dtype: torch.dtype, scales: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config=config)
        self.dtype, self.by_layer = dtype, scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        left = []
        for tensor, scale in zip((key_states, value_states), self.by_layer[layer_idx], strict=True):
            items = tensor / scale
            items = items.round().clamp(-128, 127) if self.dtype == torch.int8 else items
            left.append(items.to(self.dtype).float() * scale)
        updated: tuple[Tensor, Tensor] = super().update(*left, layer_idx, *rest, **options)
        return updated


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_attend_to_what_is_kept(tmp_path: Path, case: Case) -> None:
    architecture, geometry = case.model
    tiny = write_tiny_model(tmp_path, FAMILIES[architecture].geometries[geometry], architecture=architecture)
    config, kept = tiny.model.config, case.kept
    tiny, scales = add_cache_scales(tiny, tmp_path, kept)
    description = ModelChanges(kept=kept).apply(describe_model(tiny.checkpoint.config))
    spec = tiny.spec(
        description=description,
        ctx_batch_size=2,
        reads_context=True,
        skips_idle=True,
        tp_degree=case.tp_degree,
        **case.options,
    )
    plan = tiny.plan(description=description, tp_degree=case.tp_degree)
    tensors_kept = describe_state(spec).tensors
    assert {tensor.dtype for tensor in tensors_kept} == {kept.dtype}
    assert all(tensor.window > 0 for tensor in tensors_kept) == ("largest_step" in case.options)
    buckets = {"context_buckets": (BUCKET,), "token_buckets": (NUM_TOKENS,)}
    # Ranks add in another order: what lies in the middle between two int8 may then be rounded to the other one.
    limit = TOLERANCE if case.tp_degree == 1 else 5 * TOLERANCE
    steppers = [Stepper(spec, plan, tiny.checkpoint, rank=rank, **buckets) for rank in range(case.tp_degree)]

    @torch.no_grad()
    def compute_logits(tokens: list[int]) -> Tensor:
        cache = RoundingCache(config, getattr(torch, kept.dtype), scales)
        logits: Tensor = tiny.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]
        return logits

    def check(kind: Any, bucket: int, rows: dict[int, tuple[int, int]]) -> None:
        """Computes tokens from the first to the last of each row's sequence."""
        given = {row: (tokens[row][start:stop], start, case.places[row]) for row, (start, stop) in rows.items()}
        logits = run_ranks(case.tp_degree, lambda rank: steppers[rank].run(kind, bucket, given)["logits"])[0]
        for row, (_, stop) in rows.items():
            assert deviation(logits[row], expected[row][stop - 1]) < limit
            assert logits[row].argmax() == expected[row][stop - 1].argmax()

    for number, lengths in enumerate(LENGTHS):
        tokens = [draw_tokens(NUM_TOKENS, seed=10 * number + row) for row in range(2)]
        expected = [compute_logits(sequence) for sequence in tokens]
        assert deviation(expected[0], tiny.logits(tokens[0])) > 10 * TOLERANCE, "the cache keeps all digits"
        check("context_encoding", BUCKET, {row: (0, length) for row, length in enumerate(lengths)})
        check("context_encoding", BUCKET, {0: (lengths[0], lengths[0] + 5)})
        ends = (lengths[0] + 5, lengths[1])
        for step in range(NUM_TOKENS - max(ends)):
            check("token_generation", NUM_TOKENS, {row: (end + step, end + step + 1) for row, end in enumerate(ends)})
