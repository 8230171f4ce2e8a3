"""Checkpoints whose tensors have other names than today's, or other axes, make the same shards."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiler_svc.sharding.writer import write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.specs import make_plan
from tests.checkpoints.tiny_models import write_tiny_model

GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
NEOX = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40}
BLOOM = {"hidden_size": 32, "n_head": 4, "n_layer": 2}
OPT = {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 40}

Tensors = dict[str, torch.Tensor]


def strip(prefix: str) -> Callable[[Tensors], Tensors]:
    """The names of a checkpoint of the model without its head."""
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def add_masks(tensors: Tensors) -> Tensors:
    """As GPT-2's own checkpoint has them."""
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    return strip("transformer.")(tensors) | masks


def rename_head(tensors: Tensors) -> Tensors:
    """As the modules of transformers 5 call it, with buffers of older checkpoints."""
    names = {name: name.replace("embed_out.", "lm_head.") for name in tensors}
    buffers = {
        f"gpt_neox.layers.{layer}.attention.{name}": torch.ones(4)
        for layer in range(2)
        for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    }
    return {names[name]: tensor for name, tensor in tensors.items()} | buffers


CHECKPOINTS: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2, add_masks),
    "gpt-neox": ("GPTNeoXForCausalLM", NEOX, rename_head),
    "bloom": ("BloomForCausalLM", BLOOM, strip("transformer.")),
    "opt": ("OPTForCausalLM", OPT, strip("model.")),
}


def render_shards(path: Path, tp_degree: int) -> list[bytes]:
    checkpoint = Checkpoint.open(path)
    plan, shards = make_plan(checkpoint, tp_degree=tp_degree), []
    for rank in range(tp_degree):
        write_shards(plan, checkpoint, {rank: (shard := io.BytesIO())})
        shards.append(shard.getvalue())
    return shards


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in change(tensors).items()}, path / "model.safetensors"
    )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_other_names_make_the_same_shards(name: str, tmp_path: Path) -> None:
    architecture, attributes, change = CHECKPOINTS[name]
    write_tiny_model(tmp_path, attributes, architecture=architecture)
    expected = {tp_degree: render_shards(tmp_path, tp_degree) for tp_degree in (1, 2)}
    before = set(load_file(tmp_path / "model.safetensors"))
    rewrite(tmp_path, change)
    assert set(load_file(tmp_path / "model.safetensors")) != before
    for tp_degree, shards in expected.items():
        assert render_shards(tmp_path, tp_degree) == shards


def test_a_tensor_under_two_names_is_one_too_many(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, GPT2, architecture="GPT2LMHeadModel")
    name = "transformer.h.0.ln_1.weight"
    rewrite(tmp_path, lambda tensors: tensors | {name.removeprefix("transformer."): tensors[name]})
    with pytest.raises(CheckpointInvalid, match=r"h\.0\.ln_1\.weight: got one more transformer\.h\.0\.ln_1"):
        render_shards(tmp_path, 1)


def test_matrices_by_the_other_axis_have_the_shape_that_the_checkpoint_stores(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, GPT2, architecture="GPT2LMHeadModel")
    name = "transformer.h.1.attn.c_attn.weight"
    rewrite(tmp_path, lambda tensors: tensors | {name: tensors[name].t()})
    with pytest.raises(CheckpointInvalid, match=r"shape \[96, 32\]; accepted: shape \[32, 96\]"):
        render_shards(tmp_path, 1)
