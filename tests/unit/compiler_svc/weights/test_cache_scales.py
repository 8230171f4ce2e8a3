"""Scales of KV caches under the names, and in the shapes, that quantizers and engines give them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compiler_svc.planning.build_plan import plan_build
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.quantized import WRITERS
from tests.checkpoints.random_weights import write_checkpoint
from tests.ranks.stepping import load_shard
from tests.unit.compiler_svc.config.resolving import resolve

NAMES: Final = (
    "self_attn.{}_scale",
    "self_attn.attn.{}_scale",
    "self_attn.{0}_proj.{0}_scale",
    "self_attn.{}_proj.output_scale",
)
SCALED: Final = resolve(kv_quant_config={"direct_cast": False}, torch_dtype="float32").config.neuron_config


def write_scales(path: Path, name: str, *, shape: tuple[int, ...] = (), writer: str | None = None) -> Checkpoint:
    """The tiny checkpoint with a scale of keys and one of values in each layer: 0.25 and 0.5, or one more."""
    write_checkpoint(path)
    if writer is not None:
        WRITERS[writer].rewrite(path)
    scales = {
        f"model.layers.{layer}.{name.format(kind)}": np.full(shape, layer + number, np.float32)
        for layer in range(2)
        for kind, number in (("k", 0.25), ("v", 0.5))
    }
    save_file(load_file(path / "model.safetensors") | scales, path / "model.safetensors")
    return Checkpoint.open(path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("writer", "shape"), [(None, ()), ("int8-channel", (1,)), ("int8-channel", ())])
def test_scales_are_found(tmp_path: Path, name: str, writer: str | None, shape: tuple[int, ...]) -> None:
    checkpoint = write_scales(tmp_path / "tiny", name, shape=shape, writer=writer)
    shard = load_shard(plan_build(checkpoint, SCALED, target="cpu").weights, checkpoint)
    scales = {tensor: values.tolist() for tensor, values in shard.items() if tensor.endswith(("k_scale", "v_scale"))}
    assert scales == {
        "model.layers.0.self_attn.k_scale": [0.25],
        "model.layers.0.self_attn.v_scale": [0.5],
        "model.layers.1.self_attn.k_scale": [1.25],
        "model.layers.1.self_attn.v_scale": [1.5],
    }


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_quantizers_stay_unread_where_caches_have_none(tmp_path: Path, name: str) -> None:
    checkpoint = write_scales(tmp_path / "tiny", name, writer="int8-channel")
    plain = resolve(torch_dtype="float32").config.neuron_config
    assert not [one for one in plan_build(checkpoint, plain, target="cpu").weights.tensors if "k_scale" in one.name]


def test_a_scale_under_two_names_is_refused(tmp_path: Path) -> None:
    checkpoint = write_scales(tmp_path / "tiny", NAMES[0])
    tensors = load_file(tmp_path / "tiny" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.output_scale"] = np.ones((), np.float32)
    save_file(tensors, tmp_path / "tiny" / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "tiny")
    with pytest.raises(CheckpointInvalid, match=r"one more model\.layers\.0\.self_attn\.k_scale"):
        plan_build(checkpoint, SCALED, target="cpu")
