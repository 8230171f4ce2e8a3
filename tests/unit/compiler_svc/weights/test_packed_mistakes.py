"""Quantized checkpoints that are refused: parts that lack or do not fit, and methods that are not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiler_svc.models.errors import ModelConfigInvalid, ModelNotServed
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.ranks.stepping import load_shard
from tests.unit.compiler_svc.weights.test_packed import ATTRIBUTES, DOWN, write_quantized


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def replace_by(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


MISTAKES = {
    "no scales": (
        "int8-channel",
        lambda tensors: tensors.pop(f"{DOWN}.weight_scale"),
        f"{DOWN}.weight_scale: got missing; accepted: a tensor that belongs to {DOWN}.weight, as quantization_config",
    ),
    "no scales of words": (
        "int4-groups",
        lambda tensors: tensors.pop(f"{DOWN}.weight_scale"),
        f"{DOWN}.weight_scale: got missing; accepted: a tensor that belongs to {DOWN}.weight_packed",
    ),
    "no zero points": (
        "int4-groups-zeros",
        lambda tensors: tensors.pop(f"{DOWN}.weight_zero_point"),
        f"{DOWN}.weight_zero_point: got missing",
    ),
    "no zero points of GPTQ": ("gptq-4", lambda tensors: tensors.pop(f"{DOWN}.qzeros"), f"{DOWN}.qzeros: got missing"),
    "no order of inputs": (
        "gptq-4-reordered",
        lambda tensors: tensors.pop(f"{DOWN}.g_idx"),
        f"{DOWN}.g_idx: got missing",
    ),
    "a matrix that is not quantized beside the items": (
        "int4-groups",
        lambda tensors: tensors.update({f"{DOWN}.weight": torch.zeros(64, 80)}),
        f"{DOWN}.weight: got one more matrix, beside {DOWN}.weight_packed; accepted: a matrix in one form",
    ),
    "zero points that are added": (
        "torchao-int4",
        lambda tensors: tensors.pop(f"{DOWN}._weight_zero_point"),
        f"{DOWN}._weight_zero_point: got missing",
    ),
    "factors of activations": (
        "torchao-int8",
        lambda tensors: tensors.update({f"{DOWN}._weight_act_pre_scale": torch.ones(80)}),
        f"{DOWN}._weight_act_pre_scale: got unexpected: it belongs to a matrix or a cache that is quantized",
    ),
    "another method's items": (
        "int8-channel",
        lambda tensors: tensors.update({f"{DOWN}.qweight": torch.zeros(10, 64, dtype=torch.int32)}),
        f"{DOWN}.qweight: got unexpected: it belongs to a matrix or a cache that is quantized",
    ),
    "two scales": (
        "fp8-blocks",
        lambda tensors: tensors.update({f"{DOWN}.weight_scale": torch.ones(64, 1)}),
        f"{DOWN}.weight_scale: got unexpected: it belongs to a matrix or a cache that is quantized",
    ),
    "short scales": (
        "int8-channel",
        replace_by(f"{DOWN}.weight_scale", lambda one: one[:5]),
        f"{DOWN}.weight_scale: got shape [5, 1]; accepted: scales of 64 outputs and 80 inputs, or of groups",
    ),
    "groups that do not divide": (
        "int4-groups",
        replace_by(f"{DOWN}.weight_scale", lambda one: one[:, :3]),
        f"{DOWN}.weight_scale: got shape [64, 3]",
    ),
    "other blocks": (
        "fp8-blocks",
        replace_by(f"{DOWN}.weight_scale_inv", lambda one: one[:1]),
        f"{DOWN}.weight_scale_inv: got shape [1, 3]; accepted: scales of 64 outputs and 80 inputs, one for",
    ),
    "scales that are integers": (
        "int8-channel",
        replace_by(f"{DOWN}.weight_scale", lambda one: one.int()),
        f"{DOWN}.weight_scale: got dtype int32",
    ),
    "words that are bytes": (
        "int4-groups",
        replace_by(f"{DOWN}.weight_packed", lambda one: one.view(torch.uint8)),
        f"{DOWN}.weight_packed: got dtype uint8",
    ),
    "no outputs": (
        "int4-groups",
        lambda tensors: [
            replace_by(f"{DOWN}.{part}", lambda one: one[:0])(tensors) for part in ("weight_packed", "weight_scale")
        ],
        f"{DOWN}.weight_scale: got shape [0, 5]; accepted: scales of 0 outputs and 80 inputs",
    ),
    "other zero points": ("awq", replace_by(f"{DOWN}.qzeros", lambda one: one[1:]), f"{DOWN}.qzeros: got shape [4, 8]"),
    "fewer groups": (
        "gptq-4-reordered",
        replace_by(f"{DOWN}.g_idx", lambda one: one[1:]),
        f"{DOWN}.g_idx: got shape [79]",
    ),
    "a matrix of another size": (
        "int4-groups",
        lambda tensors: [
            replace_by(f"{DOWN}.{part}", lambda one: one[:, :4])(tensors) for part in ("weight_packed", "weight_scale")
        ],
        f"{DOWN}.weight: got shape [64, 32]; accepted: shape [64, 80], as config.json says",
    ),
}


@pytest.mark.parametrize(("name", "edit", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(name: str, edit: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, name)
    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointInvalid) as caught:
        TinyModel(None, Checkpoint.open(tmp_path)).plan()  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("int8-channel", "weight_scale", float("nan"), "weight_scale: got NaN or infinite; accepted: finite numbers"),
        (
            "torchao-int4",
            "_weight_zero_point",
            float("inf"),
            "_weight_zero_point: got NaN or infinite",
        ),
        ("torchao-int8", "_weight_zero_point", 1, "_weight_zero_point: got others than 0; accepted: zeros, as"),
        ("gptq-4-reordered", "g_idx", 5, "g_idx: got 0 to 5; accepted: groups from 0 to 4"),
        ("gptq-4-reordered", "g_idx", -1, "g_idx: got -1 to 4; accepted: groups from 0 to 4"),
    ],
)
def test_values_that_are_none_are_named(name: str, part: str, value: float, message: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, name)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.{part}"].view(-1)[7] = value

    edit_tensors(tmp_path, edit)
    tiny = TinyModel(None, Checkpoint.open(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(CheckpointInvalid) as caught:
        load_shard(tiny.plan(), tiny.checkpoint)
    assert f"{DOWN}.{message}" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantization_config.quant_method: got 'bitsandbytes'",
        ),
        ({"quant_method": ["gptq"]}, "quantization_config.quant_method: got ['gptq']"),
        ({"quant_method": "gptq", "bits": 2**20}, "quantization_config.bits: got 1048576; "),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 2**20}}},
            },
            "quantization_config.config_groups.a.weights.num_bits: got 1048576; accepted: 4 or 8",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int8_weight_only"},
            "quantization_config.quant_type: got 'int8_weight_only'; accepted: the object that torchao writes",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}},
            "quantization_config.quant_type.default._type: got 'FqnToConfig'; accepted: Float8Dynamic",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "Int4WeightOnlyConfig",
                        "_data": {"int4_packing_format": {"_data": "TILE_PACKED_TO_4D"}},
                    }
                },
            },
            "quant_type.default._data.int4_packing_format: got 'TILE_PACKED_TO_4D'; accepted: PLAIN",
        ),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits: got 3; accepted: 2 or 4 or 8"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "quantization_config.version: got 'gemv'; accepted: gemm",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "quantization_config.weight_block_size: got 128"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": {}}},
            "quantization_config.format: got 'nvfp4-pack-quantized'",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "quantization_config.config_groups: got {}"),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
                "config_groups": {"a": {}},
            },
            "quantization_config.sparsity_config.format: got 'sparse-24-bitmask'; accepted: dense",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    name: {"weights": {"num_bits": bits, "type": "int"}} for name, bits in (("a", 4), ("b", 8))
                },
            },
            "quantization_config.config_groups: got ['a', 'b']; accepted: groups whose weights have the same bits",
        ),
    ],
)
def test_methods_that_are_not_read_are_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, ATTRIBUTES)
    text = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises((ModelNotServed, ModelConfigInvalid)) as caught:
        _ = Checkpoint.open(tmp_path).description
    assert message in str(caught.value)


def test_pickles_of_torchao_are_named(tmp_path: Path) -> None:
    """Their owner can save safetensors instead. No pickle is opened to say so."""
    write_quantized(tmp_path, "torchao-int8")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for quant_type in ({"default": {"_type": "Int8WeightOnlyConfig"}}, "int8_weight_only"):
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["quant_type"] = quant_type
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointInvalid) as caught:
            Checkpoint.open(tmp_path, read_pickles=False)
        (violation,) = caught.value.violations
        assert (violation.field, violation.value) == ("pytorch_model.bin", "pickles of a library's own tensors")
        assert "load the model with transformers 5 and torchao, and save it" in violation.accepted
