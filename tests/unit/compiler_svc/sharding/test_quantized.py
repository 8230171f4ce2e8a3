"""Quantized models compute what transformers computes with matrices that the test has quantized by rules of its own."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn

from bundle.abi.formats import FORMATS
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import ByHeads
from compiler_svc.models.registry import describe_model
from compiler_svc.models.specs import LinearSpec, ModuleSlice
from compiler_svc.models.transforms import INT4, ModelChanges, Quantization
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, write_tiny_model
from tests.contract.families.geometries import FIRST, Geometry
from tests.parity.geometries import LLAMA_GEOMETRIES
from tests.ranks.stepping import load_shard
from tests.unit.compiler_svc.sharding.test_ranks import NUM_PROMPT_TOKENS, TOKENS, generate_together

#: What a configuration names.
NAMES: Final = (*(name for name, row in FORMATS.items() if not row.group), INT4)
LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 240.0, "float8_e5m2": 57344.0}


def dequantize(matrix: Tensor, name: str) -> Tensor:
    """What is left of a matrix [outputs, inputs]; scales are computed in float64."""
    row = FORMATS[name]
    if row.group:
        # By compressed-tensors' rules, in float32: of so many steps some are near to the middle between two.
        args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=row.group)
        groups = matrix.unflatten(1, (-1, row.group))
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        return fake_quantize(matrix, scales, zeros.float().round(), args)
    largest = matrix.double().abs().amax(1, keepdim=True) if row.is_per_channel else matrix.double().abs().max()
    scale = (largest / (127.5 if name == "int8_per_tensor" else LARGEST[row.item])).float()
    scale = scale.clamp(min=1e-5 if row.is_per_channel and row.item != "int8" else 1e-30)
    items = (matrix / scale).clamp(-LARGEST[row.item] - (row.item == "int8"), LARGEST[row.item])
    kept = items.round() if row.item == "int8" else items.to(getattr(torch, row.item)).float()
    return kept * scale


def replace_matrices(tiny: TinyModel, description: ModelDescription, quantization: Quantization) -> None:
    """Puts what is left of quantized matrices into the reference, of each module of the description by itself."""
    reference, storage = tiny.model, description.storage
    head = reference.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    for linear in description.linears():
        if linear.is_quantizable and not any(one in linear.name for one in quantization.skipped):
            matrix, rows = find_rows(tiny, linear, description)
            is_transposed = storage.is_transposed and linear is not description.head
            target = matrix.detach().t() if is_transposed else matrix.detach()
            target[rows] = dequantize(target[rows], choose_row(linear, quantization.format))


def choose_row(linear: LinearSpec, name: str) -> str:
    """The row of a layer: int4's groups reach over no heads."""
    if name != INT4:
        return name
    division = linear.inputs.division
    unit = division.head_dim if isinstance(division, ByHeads) else linear.inputs.length
    return next((f"int4_by_{group}" for group in (128, 64, 32) if unit % group == 0), "int8_per_channel")


def find_rows(tiny: TinyModel, linear: LinearSpec, description: ModelDescription) -> tuple[Tensor, Tensor]:
    """The reference's matrix that has a linear layer's outputs, and which of its rows they are."""
    slices = linear.slices or (ModuleSlice(linear.name, 0, linear.outputs.length),)
    (module,) = {one.module for one in slices}
    rows = torch.cat([torch.arange(one.start, one.start + one.length) for one in slices])
    if linear is description.head:
        return tiny.model.get_output_embeddings().weight, rows
    return tiny.model.get_parameter(description.storage.find_name(f"{module}.weight")), rows


def check(tiny: TinyModel, quantization: Quantization, tp_degree: int, *, fuses_qkv: bool, **changes: Any) -> float:
    """Compares a quantized model's logits with the reference's; returns how far quantization took them."""
    description = describe_model(tiny.checkpoint.config)
    before = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    replace_matrices(tiny, description, quantization)
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    quantized = ModelChanges(fuses_qkv=fuses_qkv, quantization=quantization).apply(description)
    spec = tiny.spec(tp_degree=tp_degree, description=quantized, **changes)
    for outputs in generate_together(tiny, spec):
        assert deviation(outputs["logits"], expected) < (TOLERANCE if spec.dtype == "float32" else 1e-1)
    return deviation(expected, before)


def choose_cases() -> list[Any]:
    """Each format of each family's first geometry, by turns with one rank or two, and fused or not."""
    return [
        pytest.param(one, name, 1 + number % 2, number // 2 % 2 == 1, marks=[] if is_short else [pytest.mark.slow])
        for number, ((place, one), (other, name)) in enumerate(product(enumerate(FIRST), enumerate(NAMES)))
        for is_short in [(place + other) % len(NAMES) == 0]
    ]


@pytest.mark.parametrize(("geometry", "name", "tp_degree", "fuses_qkv"), choose_cases())
def test_families(geometry: Geometry, name: str, tp_degree: int, fuses_qkv: bool, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, geometry.attributes, architecture=geometry.architecture)
    assert check(tiny, Quantization(format=name), tp_degree, fuses_qkv=fuses_qkv) > 10 * TOLERANCE


@pytest.mark.parametrize("geometry", ["gqa2-tied-linear", "padded-groups-bias"])
def test_ranks_that_pad_and_copy_heads(geometry: str, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES[geometry])
    check(tiny, Quantization(format="int8_per_channel"), 4, fuses_qkv=True)


def test_bfloat16(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES["gqa2-tied-linear"])
    check(tiny, Quantization(format="f8e4m3_per_channel"), 1, fuses_qkv=False, dtype="bfloat16")


def test_skipped_modules_stay(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES["mha-bias-default"])
    quantization = Quantization(format="int8_per_tensor", skipped=("self_attn", "lm_head"))
    description = ModelChanges(quantization=quantization).apply(describe_model(tiny.checkpoint.config))
    quantized = {one.module for one in description.linears() if one.format}
    assert quantized == {"gate_proj", "up_proj", "down_proj"}
    check(tiny, quantization, 1, fuses_qkv=True)


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
