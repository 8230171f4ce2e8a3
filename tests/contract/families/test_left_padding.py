"""Prompts that are padded on the left, against transformers with an attention mask."""

from __future__ import annotations

from pathlib import Path

import torch

from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.tiny_models import GEOMETRIES, TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.contract.families.numbers import make_stepper
from tests.ranks.stepping import Stepper, run_exported

BUCKET = 16


@torch.no_grad()
def padded_logits(tiny: TinyModel, prompts: list[list[int]], bucket: int) -> torch.Tensor:
    """What transformers gives for the last token of prompts padded to a bucket, f32 [prompts, vocab_size]."""
    ids = torch.tensor([[5] * (bucket - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (bucket - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits: torch.Tensor = tiny.model(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    return logits.float()


def test_prompts_at_the_edges_of_buckets(tiny: TinyModel) -> None:
    check_edges(tiny, make_stepper(tiny, padding_side="left"))


def test_exported_graphs_compute_the_same(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["gqa-llama3-tied"])
    check_edges(tiny, make_stepper(tiny, run_exported, padding_side="left"))


def check_edges(tiny: TinyModel, stepper: Stepper) -> None:
    for length in (1, BUCKET - 1, BUCKET, BUCKET + 1, 63, 64):
        prompt = draw_tokens(length, seed=length)
        logits = stepper.prefill({length % 3: prompt})["logits"][0]
        bucket = BUCKET if length <= BUCKET else 64
        assert deviation(logits, padded_logits(tiny, [prompt], bucket)[0]) < TOLERANCE
        assert deviation(logits, tiny.logits(prompt)[-1]) < TOLERANCE


def test_prompts_of_different_lengths_in_one_step(tiny: TinyModel) -> None:
    """A whole bucket, one token and an idle row; then each continues from its own keys and values."""
    stepper = make_stepper(tiny, padding_side="left", ctx_batch_size=3)
    prompts = {2: draw_tokens(BUCKET, seed=1), 0: draw_tokens(1, seed=2)}
    logits = stepper.prefill(prompts)["logits"]
    expected = padded_logits(tiny, list(prompts.values()), BUCKET)
    assert deviation(logits[:2], expected) < TOLERANCE
    assert not logits.isnan().any(), "a row without a valid token has nothing to attend to"
    for step in range(20):
        fed = {slot: (7 + step, len(prompt) + step) for slot, prompt in prompts.items()}
        logits = stepper.decode(fed)["logits"]
    for slot, prompt in prompts.items():
        assert deviation(logits[slot], tiny.logits([*prompt, *range(7, 27)])[-1]) < TOLERANCE


def test_keys_and_values_are_those_of_right_padding(tiny: TinyModel) -> None:
    prompt = draw_tokens(5)
    left, right = (make_stepper(tiny, padding_side=side) for side in ("left", "right"))
    for stepper in (left, right):
        stepper.prefill({1: prompt})
    num_slots = left.spec.num_slots
    for ours, theirs in zip(left.state, right.state, strict=True):
        torch.testing.assert_close(ours[1, :, :5], theirs[1, :, :5], atol=1e-5, rtol=1e-4)
        written = torch.ones(num_slots, ours.shape[2], dtype=torch.bool)
        written[1, :5] = False
        kept = written[:, None, :, None].expand(ours[:num_slots].shape)
        assert torch.equal(ours[:num_slots][kept], theirs[:num_slots][kept]), "padding was written"


def test_executable_says_on_which_side_it_is_padded(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["gqa-llama3-tied"] | {"num_hidden_layers": 1})
    spec, plan = tiny.spec(padding_side="left"), tiny.plan()
    left = describe_submodel(spec, "context_encoding", BUCKET)
    right = describe_submodel(tiny.spec(), "context_encoding", BUCKET)
    assert set(left.flags) - set(right.flags) == {"left_padded"}
    assert describe_submodel(spec, "token_generation", BUCKET).flags == right.flags
    left_graph, right_graph = (export_submodel(tiny.spec(padding_side=side), plan, left) for side in ("left", "right"))
    assert left_graph.graph_digest != right_graph.graph_digest
