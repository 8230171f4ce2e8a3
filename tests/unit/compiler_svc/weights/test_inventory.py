"""Tensors that the model does not take: named and left unread, unless they would change what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from compiler_svc.sharding.plan import plan_weights
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import MAX_LISTED, CheckpointInvalid
from compiler_svc.weights.inventory import set_surplus_aside, warn_of_surplus
from compiler_svc.weights.tensors import check_finite, check_zeros
from tests.checkpoints.random_weights import CONFIG, random_tensors, write_checkpoint

Tensors = dict[str, np.ndarray]
LAYER = "model.layers.0"


def ones(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def in_layers(name: str, tensor: np.ndarray, numbers: tuple[int, ...] = (0, 1)) -> Tensors:
    return {f"model.layers.{number}.{name}": tensor for number in numbers}


def store(path: Path, added: Tensors, *, prefix: str = "") -> Checkpoint:
    """The tiny checkpoint with more tensors."""
    write_checkpoint(path / "tiny")
    tensors = {f"{prefix}{name}": tensor for name, tensor in random_tensors(CONFIG, 0).items()}
    save_file(tensors | added, path / "tiny/model.safetensors")
    return Checkpoint.open(path / "tiny")


def plan(checkpoint: Checkpoint) -> None:
    plan_weights(checkpoint.description, checkpoint, dtype="float32", cast_type="config", tp_degree=1)


def list_warned(checkpoint: Checkpoint) -> list[str]:
    """What the warnings list."""
    return [
        one for text in warn_of_surplus(set_surplus_aside(checkpoint)) for one in text.split(": ", 2)[2].split("; ")
    ]


SURPLUS: dict[str, tuple[Tensors, list[str]]] = {
    "value head": (
        {"v_head.summary.weight": ones(1, 32), "v_head.summary.bias": ones(1)},
        ["v_head.* (2 tensors, 132 bytes)"],
    ),
    "heads of rewards": (
        {"score.weight": ones(1, 32, dtype=np.float16), "model.regression_head.out.weight": ones(2)},
        ["score.* (1 tensor, 64 bytes)", "model.regression_head.* (1 tensor, 8 bytes)"],
    ),
    "cached tables": (
        in_layers("self_attn.rotary_emb.inv_freq", ones(4)) | in_layers("self_attn.rotary_emb.cos_cached", ones(8)),
        ["model.layers.{0-1}.self_attn.rotary_emb.* (4 tensors, 96 bytes)"],
    ),
    "masks": (
        in_layers("self_attn.bias", ones(1, 1, 8, 8, dtype=np.bool_)) | in_layers("self_attn.masked_bias", ones()),
        [
            "model.layers.{0-1}.self_attn.bias (2 tensors, 128 bytes)",
            "model.layers.{0-1}.self_attn.masked_bias (2 tensors, 8 bytes)",
        ],
    ),
    "layers beyond the last": (
        in_layers("self_attn.q_proj.bias", ones(3), (2, 3, 5)) | in_layers("eh_proj.weight", ones(3), (2,)),
        ["model.layers.{2-3,5}.* (4 tensors, 48 bytes)"],
    ),
    "layers of another list": (
        {"model.mtp_layers.0.self_attn.q_norm.weight": ones(2), "mtp.layers.0.self_attn.sinks": ones(2)},
        ["model.mtp_layers.* (1 tensor, 8 bytes)", "mtp.* (1 tensor, 8 bytes)"],
    ),
    "what trainers add": (
        {"global_step": np.array(7), "ema.decay": ones(), f"{LAYER}.mlp.calls": ones(1, dtype=np.uint8)},
        ["ema.* (1 tensor, 4 bytes)", "global_step (1 tensor, 8 bytes)", f"{LAYER}.mlp.calls (1 tensor, 1 bytes)"],
    ),
    "nothing in what would change numbers": (
        {
            "lm_head.weight": ones(0),
            **{f"{LAYER}.self_attn.{name}": ones(0) for name in ("q_proj.g_idx", "k_norm.weight", "o_proj.bias")},
        },
        ["lm_head.weight (1 tensor, 0 bytes)"],
    ),
}


@pytest.mark.parametrize("kind", SURPLUS)
def test_what_changes_nothing_is_named_and_not_read(tmp_path: Path, kind: str) -> None:
    added, listed = SURPLUS[kind]
    added = {name: np.full_like(one, np.nan) if one.dtype == np.float32 else one for name, one in added.items()}
    checkpoint = store(tmp_path, added)
    plan(checkpoint)
    assert set(listed) <= set(list_warned(checkpoint))
    aside = set_surplus_aside(checkpoint)
    assert {one.header.name for one in aside.surplus} == added.keys()
    assert aside.tensors.keys() == random_tensors(CONFIG, 0).keys()
    check_zeros(aside)
    check_finite(aside)


def test_a_checkpoint_without_surplus_warns_of_nothing(tmp_path: Path) -> None:
    assert list_warned(store(tmp_path, {})) == []


def test_files_of_the_base_model_have_their_own_names_in_warnings(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    tensors = {name.removeprefix("model."): tensor for name, tensor in random_tensors(CONFIG, 0).items()}
    more = {"layers.2.mlp.up_proj.weight": ones(2), "layers.0.self_attn.rotary_emb.inv_freq": ones(4)}
    save_file(tensors | more, tmp_path / "tiny/model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "tiny")
    plan(checkpoint)
    assert list_warned(checkpoint) == [
        "layers.0.self_attn.rotary_emb.* (1 tensor, 16 bytes)",
        "layers.2.* (1 tensor, 8 bytes)",
    ]


def test_many_patterns_are_counted(tmp_path: Path) -> None:
    listed = list_warned(store(tmp_path, {f"extra{number}.weight": ones(1) for number in range(MAX_LISTED + 3)}))
    assert len(listed) == MAX_LISTED + 1
    assert listed[-1] == "and 3 patterns more"


CHANGES: dict[str, tuple[Tensors, str]] = {
    "scales": (in_layers("self_attn.q_proj.weight_scale", ones(1)), "quantized"),
    "a scale of the cache": (in_layers("self_attn.k_scale", ones()), "quantized"),
    "packed items": (in_layers("mlp.up_proj.qweight", ones(4, 64, dtype=np.int32)), "quantized"),
    "a map of bitsandbytes": (in_layers("mlp.up_proj.weight.quant_map", ones(16)), "quantized"),
    "norms of heads": (in_layers("self_attn.q_norm.weight", ones(8)), "norm"),
    "norms of one head each": (in_layers("self_attn.k_layernorm.norms.0.weight", ones(8)), "norm"),
    "norms of outputs": (in_layers("post_feedforward_layernorm.weight", ones(32)), "norm"),
    "sinks": (in_layers("self_attn.sinks", ones(4)), "sinks"),
    "adapters": (in_layers("self_attn.q_proj.lora_A.default.weight", ones(2, 32)), "adapter"),
    "adapters of a fused matrix": (in_layers("self_attn.qkv_proj.lora_B.weight", ones(2, 32)), "adapter"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_would_change_numbers_is_refused_with_what_it_belongs_to(tmp_path: Path, kind: str) -> None:
    added, belongs_to = CHANGES[kind]
    checkpoint = store(tmp_path, added)
    with pytest.raises(CheckpointInvalid, match="would change what the model computes") as caught:
        plan(set_surplus_aside(checkpoint))
    (violation,) = caught.value.violations
    assert violation.field == next(iter(added)).replace(".0.", ".{0-1}.", 1)
    assert belongs_to in violation.value


@pytest.mark.parametrize("name", [f"{LAYER}.self_attn.q_proj.bias", f"{LAYER}.input_layernorm.bias", "lm_head.bias"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_biases_are_read_for_zeros(tmp_path: Path, name: str, dtype: type) -> None:
    checkpoint = store(tmp_path, {name: np.zeros(32, dtype)})
    plan(checkpoint)
    (warning,) = warn_of_surplus(set_surplus_aside(checkpoint))
    assert f"{name} (1 tensor, {32 * dtype().itemsize} bytes)" in warning
    assert "refuses them if they are not zeros" in warning
    check_zeros(set_surplus_aside(checkpoint))
    for value in (1e-7, np.nan):
        checkpoint = store(tmp_path / str(value), {name: np.array([0, value], dtype)})
        with pytest.raises(CheckpointInvalid, match="a bias that config") as caught:
            check_zeros(set_surplus_aside(checkpoint))
        assert caught.value.subject == name


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("base_model.model.", "merge_and_unload"),
        ("module.", "DataParallel"),
        ("_orig_mod.", "torch.compile"),
        ("language_model.", "more than text"),
    ],
)
def test_prefixes_below_which_transformers_finds_nothing_are_refused_by_name(
    tmp_path: Path, prefix: str, words: str
) -> None:
    with pytest.raises(CheckpointInvalid) as caught:
        plan(store(tmp_path, {}, prefix=prefix))
    (violation,) = caught.value.violations
    assert violation.field == f"{prefix}*"
    assert violation.value.startswith(f"{len(random_tensors(CONFIG, 0))} of the model's tensors")
    assert words in violation.value + violation.accepted


def test_the_prefix_of_text_inside_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    tensors = {n.replace("model.", "model.language_model.", 1): one for n, one in random_tensors(CONFIG, 0).items()}
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, tmp_path / "tiny/model.safetensors")
    with pytest.raises(CheckpointInvalid) as caught:
        plan(Checkpoint.open(tmp_path / "tiny"))
    assert [one.field for one in caught.value.violations] == ["model.language_model.*", "model.norm.weight"]


def test_adapters_below_their_prefix_are_adapters(tmp_path: Path) -> None:
    name = f"base_model.model.{LAYER}.mlp.up_proj.lora_A.weight"
    with pytest.raises(CheckpointInvalid, match="belongs to an adapter") as caught:
        plan(store(tmp_path, {name: ones(2, 32)}))
    assert caught.value.subject == name


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"norm\.weight: got one more model\.norm\.weight"):
        plan(store(tmp_path, {"norm.weight": ones(32)}))


def test_overrides_that_take_layers_away_leave_theirs(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", num_hidden_layers=1)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 1
    checkpoint = Checkpoint.open(path)
    plan(checkpoint)
    assert [one.partition(" (")[0] for one in list_warned(checkpoint)] == ["model.layers.1.*"]


def test_sizes_are_those_of_dtypes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    tensors = {name: torch.from_numpy(one) for name, one in random_tensors(CONFIG, 0).items()}
    (tmp_path / "tiny/model.safetensors").unlink()
    dtypes = (torch.bool, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float64)
    more = {f"a{number}.x": torch.zeros(5, dtype=dtype) for number, dtype in enumerate(dtypes)}
    torch.save(tensors | more, tmp_path / "tiny/pytorch_model.bin")
    sizes = [one.partition("tensor, ")[2] for one in list_warned(Checkpoint.open(tmp_path / "tiny"))]
    assert sizes == [f"{5 * dtype.itemsize} bytes)" for dtype in dtypes]
