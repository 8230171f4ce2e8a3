import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiler_svc.models.registry import describe_model
from compiler_svc.models.sources import StoredSource, TensorSlice
from compiler_svc.sharding.errors import ShardingNotServed
from compiler_svc.sharding.plan import plan_weights
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.tiny_models import GEOMETRIES, ROPES, TinyModel, write_tiny_model
from tests.repository import ROOT


def write(path: Path, geometry: str, **changes: Any) -> TinyModel:
    return write_tiny_model(path, GEOMETRIES[geometry] | changes)


def replan(path: Path) -> None:
    """Plans what the directory holds now."""
    checkpoint = Checkpoint.open(path)
    plan_weights(describe_model(checkpoint.config), checkpoint, dtype="float32", cast_type="config", tp_degree=1)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_plan_covers_the_checkpoint_and_its_size(geometry: str, tmp_path: Path) -> None:
    tiny = write(tmp_path, geometry)
    plan = tiny.plan()
    stored = [tensor.spec.source for tensor in plan.tensors if isinstance(tensor.spec.source, StoredSource)]
    assert sorted(one.tensor for source in stored for one in source.slices) == sorted(tiny.checkpoint.tensors)
    num_elements = sum(parameter.numel() for parameter in tiny.model.parameters())
    assert plan.shard_size_bytes == 4 * (num_elements + tiny.model.config.head_dim // 2)
    half = tiny.plan(dtype="bfloat16")
    assert half.shard_size_bytes == 2 * num_elements + 4 * (tiny.model.config.head_dim // 2)


def test_tied_head_is_stored_once(tmp_path: Path) -> None:
    names = [tensor.name for tensor in write(tmp_path, "gqa-llama3-tied").plan().tensors]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_tied_head_is_cut_apart_for_several_ranks(tmp_path: Path) -> None:
    plan = write(tmp_path, "gqa-llama3-tied", vocab_size=212).plan(tp_degree=2)
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert by_name["lm_head.weight"].spec.source == StoredSource((TensorSlice("model.embed_tokens.weight", 0, 212),))
    assert by_name["lm_head.weight"].rank_shape == (106, 64)
    assert by_name["model.embed_tokens.weight"].rank_shape == (212, 32)


def rank_shapes(tiny: TinyModel, tp_degree: int) -> dict[str, tuple[int, ...]]:
    plan = tiny.plan(tp_degree=tp_degree)
    return {tensor.name.removeprefix("model.layers.0."): tensor.rank_shape for tensor in plan.tensors}


def test_shapes_of_a_rank(tmp_path: Path) -> None:
    shapes = rank_shapes(write(tmp_path, "mha-bias-untied", vocab_size=212), 2)
    assert shapes["self_attn.q_proj.weight"] == (24, 48)
    assert shapes["self_attn.q_proj.bias"] == (24,)
    assert shapes["self_attn.k_proj.weight"] == (24, 48)
    assert shapes["self_attn.v_proj.bias"] == (24,)
    assert shapes["self_attn.o_proj.weight"] == (48, 24)
    assert shapes["self_attn.o_proj.bias"] == (48,)
    assert shapes["mlp.gate_proj.weight"] == (50, 48)
    assert shapes["mlp.down_proj.weight"] == (48, 50)
    assert shapes["mlp.down_proj.bias"] == (48,)
    assert shapes["input_layernorm.weight"] == (48,)
    assert shapes["model.embed_tokens.weight"] == (212, 24)
    assert shapes["lm_head.weight"] == (106, 48)
    assert shapes["rope.inv_freq"] == (6,)
    assert shapes["rank_util.rank"] == (1,)


def test_shapes_of_a_padded_rank(tmp_path: Path) -> None:
    """Five ranks divide neither 4 heads nor 101, 48 and 211."""
    shapes = rank_shapes(write(tmp_path, "mha-bias-untied", intermediate_size=101), 5)
    assert shapes["self_attn.q_proj.weight"] == (12, 48)
    assert shapes["self_attn.k_proj.bias"] == (12,)
    assert shapes["self_attn.o_proj.weight"] == (48, 12)
    assert shapes["mlp.up_proj.bias"] == (21,)
    assert shapes["mlp.down_proj.weight"] == (48, 21)
    assert shapes["model.embed_tokens.weight"] == (211, 10)
    assert shapes["lm_head.weight"] == (43, 48)


def test_one_rank_is_told_no_rank(tmp_path: Path) -> None:
    assert "rank_util.rank" not in rank_shapes(write(tmp_path, "gqa-llama3-tied"), 1)


@pytest.mark.parametrize("tp_degree", [65, 2**31 - 1])
def test_degrees_that_leave_ranks_with_nothing(tmp_path: Path, tp_degree: int) -> None:
    tiny = write(tmp_path, "gqa-llama3-tied")
    with pytest.raises(ShardingNotServed, match="hidden_size 64; accepted: at most hidden_size, 64") as caught:
        tiny.plan(tp_degree=tp_degree)
    assert caught.value.violations[0].field == "neuron_config.tp_degree"


@pytest.mark.parametrize("attribute", ["intermediate_size", "vocab_size"])
def test_every_axis_must_have_something_for_every_rank(tmp_path: Path, attribute: str) -> None:
    tiny = write(tmp_path, "gqa-llama3-tied", **{attribute: 30})
    assert tiny.plan(tp_degree=30).tp_degree == 30
    with pytest.raises(ShardingNotServed, match=f"got 31 with {attribute} 30; accepted: at most {attribute}, 30"):
        tiny.plan(tp_degree=31)


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, Any] = load_file(path / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"got missing; accepted: a tensor of shape \[48\]"),
        ("lm_head.weight", None, "got missing"),
        ("model.norm.weight", torch.ones(49), r"got shape \[49\]; accepted: shape \[48\], as config.json says"),
        ("model.norm.weight", torch.ones(48, dtype=torch.int8), "got dtype int8; accepted: one of bfloat16"),
        ("model.norm.bias", torch.ones(48), "got unexpected"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(1), "got unexpected"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    write(tmp_path, "mha-bias-untied")
    change_tensors(tmp_path, **{name: tensor})
    with pytest.raises(CheckpointInvalid, match=message) as caught:
        replan(tmp_path)
    assert caught.value.subject == name


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, "gqa-llama3-tied", rope_parameters=ROPES["default"])
    change_tensors(
        tmp_path,
        **{"lm_head.weight": torch.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    )
    replan(tmp_path)


def test_shard_record(tmp_path: Path) -> None:
    tiny = write(tmp_path, "gqa-llama3-tied")
    shard = tiny.plan().describe_shard(0, "sha256:" + "1" * 64, 77)
    assert (shard.rank, shard.size_bytes) == (0, 77)
    names = [tensor.name for tensor in shard.tensors]
    assert names == sorted(names)
    (norm,) = (tensor for tensor in shard.tensors if tensor.name == "model.norm.weight")
    assert (norm.dtype, norm.shape) == ("float32", (64,))


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    """The service plans without the seconds that torch takes to load."""
    write(tmp_path, "gqa-llama3-tied")
    code = f"""
import subprocess
import sys
from pathlib import Path
from compiler_svc.models.registry import describe_model
from compiler_svc.models.sources import StoredSource, TensorSlice
from compiler_svc.sharding.plan import plan_weights
from compiler_svc.trace import graph_spec, submodels
from compiler_svc.golden import errors
from compiler_svc.weights.checkpoint import Checkpoint
checkpoint = Checkpoint.open(Path({str(tmp_path)!r}))
plan = plan_weights(describe_model(checkpoint.config), checkpoint, dtype="float32", cast_type="config", tp_degree=1)
assert plan.shard_size_bytes > 0
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
