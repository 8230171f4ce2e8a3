"""Matrices that no scale fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bundle.abi.formats import FORMATS
from compiler_svc.models.registry import describe_model
from compiler_svc.models.transforms import ModelChanges, Quantization
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.tiny_models import write_tiny_model
from tests.contract.families.test_quantized_logits import NAMES
from tests.parity.geometries import LLAMA_GEOMETRIES
from tests.ranks.stepping import load_shard


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_of_zeros_stays_one(name: str, tmp_path: Path) -> None:
    """Upstream's scale of such a matrix is 0 in float8 with one scale, and its items NaN."""
    tiny = write_tiny_model(tmp_path / "model", LLAMA_GEOMETRIES["mha-bias-default"])
    tiny.model.lm_head.weight.data.zero_()
    tiny.model.save_pretrained(tmp_path / "model")
    description = ModelChanges(quantization=Quantization(format=name)).apply(describe_model(tiny.checkpoint.config))
    shard = load_shard(tiny.plan(description=description), tiny.checkpoint)
    assert not shard["lm_head.weight"].float().any()
    (head,) = (one.format for one in description.linears() if one.name == "lm_head")
    assert torch.all(shard["lm_head.scale"].flatten()[0] == torch.tensor(FORMATS[head].least_scale))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_no_scale_fits_are_named(name: str, value: float, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES["mha-bias-default"] | {"hidden_size": 64, "head_dim": 32})
    matrix = "model.layers.1.mlp.up_proj.weight"
    tiny.model.get_parameter(matrix).data[2, 3] = value
    tiny.model.save_pretrained(tmp_path)
    description = ModelChanges(fuses_qkv=True, quantization=Quantization(format=name)).apply(
        describe_model(tiny.checkpoint.config)
    )
    with pytest.raises(CheckpointInvalid) as caught:
        load_shard(tiny.plan(description=description), tiny.checkpoint)
    (violation,) = caught.value.violations
    assert (violation.field, violation.value, violation.accepted) == (matrix, f"{value} at [2, 3]", "finite numbers")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_groups_wider_than_float32_are_named(architecture: str, tmp_path: Path) -> None:
    """GPT-2 stores inputs before outputs. The checkpoint names one projection, of which the model has three parts."""
    sizes = {"hidden_size": 64} if architecture.startswith("Llama") else {"n_embd": 64, "n_head": 2}
    tiny = write_tiny_model(tmp_path, sizes, architecture=architecture)
    is_transposed = architecture.startswith("GPT2")
    matrix = "transformer.h.1.attn.c_attn.weight" if is_transposed else "model.layers.1.self_attn.v_proj.weight"
    output = 2 * 64 + 5 if is_transposed else 5
    rows = tiny.model.get_parameter(matrix).data
    outputs = rows.t() if is_transposed else rows
    outputs[output, 33:35] = torch.tensor([3e38, -3e38])
    # One end may be as large as it likes.
    outputs[0, 0] = 3e38
    tiny.model.save_pretrained(tmp_path)
    changes = ModelChanges(fuses_qkv=True, quantization=Quantization(format="int4_by_32"))
    description = changes.apply(describe_model(tiny.checkpoint.config))
    with pytest.raises(CheckpointInvalid) as caught:
        load_shard(tiny.plan(description=description), tiny.checkpoint)
    (violation,) = caught.value.violations
    place = [32, output] if is_transposed else [output, 32]
    assert (violation.field, violation.value) == (matrix, f"-3e+38 to 3e+38 in the group of 32 weights at {place}")
    assert violation.accepted == "groups whose largest and smallest weight differ by a float32"
