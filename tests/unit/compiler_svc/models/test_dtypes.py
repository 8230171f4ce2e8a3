"""Low precision and mixed dtypes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import GEOMETRIES, TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.ranks.stepping import Stepper, load_shard, run_exported


def run_steps(
    tiny: TinyModel, tokens: list[int], num_prompt_tokens: int, *, dtype: str, cast_type: str
) -> torch.Tensor:
    spec, plan = tiny.spec(dtype=dtype), tiny.plan(dtype=dtype, cast_type=cast_type)
    stepper = Stepper(spec, plan, tiny.checkpoint, context_buckets=(16,), token_buckets=(64,), make_run=run_exported)
    logits = [stepper.prefill({1: tokens[:num_prompt_tokens]})["logits"][0]]
    for position in range(num_prompt_tokens, len(tokens)):
        logits += [stepper.decode({1: (tokens[position], position)})["logits"][1]]
    return torch.stack(logits)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(geometry: str, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES[geometry], dtype=torch.bfloat16)
    tokens = draw_tokens(40)
    wide = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    truth = TinyModel(wide, tiny.checkpoint).step_logits(tokens, 10)
    ours = deviation(run_steps(tiny, tokens, 10, dtype="bfloat16", cast_type="config"), truth)
    theirs = deviation(tiny.step_logits(tokens, 10), truth)
    assert 0 < ours < 1.5 * theirs


def test_as_declared_weights_keep_their_dtypes(tmp_path: Path) -> None:
    """A checkpoint of mixed dtypes, computed in float32: small shard, results of the widened weights."""
    write_tiny_model(tmp_path, GEOMETRIES["mha-bias-untied"])
    tensors = {
        name: tensor.to(torch.float32 if "norm" in name or "q_proj" in name else torch.bfloat16)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tiny = TinyModel(model, Checkpoint.open(tmp_path))
    shard = load_shard(tiny.plan(cast_type="as-declared"), tiny.checkpoint)
    assert {name: shard[name].dtype for name in tensors} == {name: tensor.dtype for name, tensor in tensors.items()}
    tokens = draw_tokens(20)
    logits = run_steps(tiny, tokens, 10, dtype="float32", cast_type="as-declared")
    assert deviation(logits, tiny.step_logits(tokens, 10)) < TOLERANCE


def test_frequencies_stay_float32(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["gqa-llama3-tied"], dtype=torch.bfloat16)
    shard = load_shard(tiny.plan(dtype="bfloat16"), tiny.checkpoint)
    assert {name for name, tensor in shard.items() if tensor.dtype == torch.float32} == {"rope.inv_freq"}
