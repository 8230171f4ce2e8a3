"""Low precision and mixed dtypes."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from bundle.abi.tensor import DType
from compiler_svc.models.registry import describe_model
from compiler_svc.models.transforms import ModelChanges
from compiler_svc.trace.submodels import describe_state
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import GEOMETRIES, TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.ranks.stepping import Stepper, load_shard, run_exported


def run_steps(
    tiny: TinyModel,
    tokens: list[int],
    num_prompt_tokens: int,
    *,
    dtype: DType,
    cast_type: str,
    attention_dtype: DType | None = None,
) -> torch.Tensor:
    description = ModelChanges(attention_dtype=attention_dtype).apply(describe_model(tiny.checkpoint.config))
    spec = tiny.spec(dtype=dtype, description=description)
    plan = tiny.plan(dtype=dtype, cast_type=cast_type, description=description)
    stepper = Stepper(spec, plan, tiny.checkpoint, context_buckets=(16,), token_buckets=(64,), make_run=run_exported)
    logits = [stepper.prefill({1: tokens[:num_prompt_tokens]})["logits"][0]]
    for position in range(num_prompt_tokens, len(tokens)):
        logits += [stepper.decode({1: (tokens[position], position)})["logits"][1]]
    return torch.stack(logits)


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


class _AttentionIn(torch.nn.Module):
    """transformers' attention in a dtype of its own: what it takes and gives has the dtype of the model."""

    def __init__(self, attention: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention, self.dtype = attention.to(dtype), dtype

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, Any]:
        cosines, sines = given.pop("position_embeddings")
        mask = given.pop("attention_mask", None)
        attended, weights = self.attention(
            hidden_states.to(self.dtype),
            position_embeddings=(cosines.to(self.dtype), sines.to(self.dtype)),
            attention_mask=None if mask is None or not mask.is_floating_point() else mask.to(self.dtype),
            **given,
        )
        return attended.to(hidden_states.dtype), weights


def test_attention_computes_in_a_dtype_of_its_own(tmp_path: Path) -> None:
    """In bfloat16 inside of a float32 model it is as coarse as transformers' attention in bfloat16; the cache, too."""
    tiny = write_tiny_model(tmp_path, GEOMETRIES["mha-bias-untied"])
    tokens = draw_tokens(24)
    truth = tiny.step_logits(tokens, 10)
    options: dict[str, Any] = {"dtype": "float32", "cast_type": "as-declared"}
    ours = run_steps(tiny, tokens, 10, attention_dtype="bfloat16", **options)
    mixed = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in mixed.model.layers:
        layer.self_attn = _AttentionIn(layer.self_attn, torch.bfloat16)
    theirs = TinyModel(mixed, tiny.checkpoint).step_logits(tokens, 10)
    whole = run_steps(tiny, tokens, 10, dtype="bfloat16", cast_type="as-declared")
    assert TOLERANCE < deviation(ours, truth) < 1.5 * deviation(theirs, truth)
    assert deviation(ours, truth) < deviation(whole, truth), "the rest computes in float32"
    description = ModelChanges(attention_dtype="bfloat16").apply(describe_model(tiny.checkpoint.config))
    state = describe_state(tiny.spec(description=description))
    assert {tensor.dtype for tensor in state.tensors} == {"bfloat16"}


def test_attention_in_float32_is_nearer_to_the_truth(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["gqa-llama3-tied"])
    tokens = draw_tokens(24)
    truth = tiny.step_logits(tokens, 10)
    options: dict[str, Any] = {"dtype": "bfloat16", "cast_type": "as-declared"}
    narrow = run_steps(tiny, tokens, 10, **options)
    mixed = run_steps(tiny, tokens, 10, attention_dtype="float32", **options)
    assert TOLERANCE < deviation(mixed, truth) < deviation(narrow, truth)
