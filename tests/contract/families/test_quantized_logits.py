"""Quantized models compute what transformers computes with matrices that the test has quantized by rules of its own."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn

from bundle.abi.formats import FORMATS, GROUPS
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import ByHeads
from compiler_svc.models.registry import describe_model
from compiler_svc.models.specs import LinearSpec, ModuleSlice
from compiler_svc.models.transforms import INT4, ModelChanges, Quantization
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, write_tiny_model
from tests.contract.families.geometries import FIRST
from tests.covering import cover
from tests.parity.geometries import LLAMA_GEOMETRIES
from tests.unit.compiler_svc.sharding.test_ranks import NUM_PROMPT_TOKENS, TOKENS, generate_together

#: What a configuration names.
NAMES: Final = (*(name for name, row in FORMATS.items() if not row.group), INT4, "int4_by_64", "int4_by_32")
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
    if not name.startswith(INT4):
        return name
    division = linear.inputs.division
    unit = division.head_dim if isinstance(division, ByHeads) else linear.inputs.length
    largest = GROUPS[0] if name == INT4 else FORMATS[name].group
    groups = (group for group in (128, 64, 32) if group <= largest and unit % group == 0)
    return next((f"int4_by_{group}" for group in groups), "int8_per_channel")


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
    tolerance = TOLERANCE if spec.dtype == "float32" else 2 * find_rounding(tiny, expected)
    for outputs in generate_together(tiny, spec):
        assert deviation(outputs["logits"], expected) < tolerance
    return deviation(expected, before)


def find_rounding(tiny: TinyModel, expected: Tensor) -> float:
    """How far transformers' logits are from those in float32 if it computes in bfloat16: 1e-2 to 4e-2."""
    narrow = TinyModel(deepcopy(tiny.model).to(torch.bfloat16), tiny.checkpoint)
    return deviation(narrow.step_logits(TOKENS, NUM_PROMPT_TOKENS), expected)


CASES: Final = cover(
    {
        "family": FIRST,
        "name": NAMES,
        "dtype": ("float32", "bfloat16"),
        "tp_degree": (1, 2),
        "fuses_qkv": (False, True),
    },
    refused=[
        {"family": one, "name": name}
        for one in FIRST
        for name in NAMES
        # No group divides its inputs.
        if name.startswith(INT4) and one.attributes.get("hidden_size", 64) % GROUPS[-1]
    ],
)
#: `make test` runs one case of each family, and so each format twice or more.
SHOWN: Final = [
    min(
        (case for case in CASES if case["family"] is one),
        key=lambda case, place=place: (NAMES.index(case["name"]) - place) % len(NAMES),
    )
    for place, one in enumerate(FIRST)
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case.values())), marks=[] if case in SHOWN else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_families(case: dict[str, Any], tmp_path: Path) -> None:
    family, name, dtype = case["family"], case["name"], case["dtype"]
    tiny = write_tiny_model(tmp_path, family.attributes, architecture=family.architecture, dtype=getattr(torch, dtype))
    # The reference multiplies in float32 by the values that the checkpoint has.
    tiny.model.float()
    moved = check(tiny, Quantization(format=name), case["tp_degree"], fuses_qkv=case["fuses_qkv"], dtype=dtype)
    assert moved > 10 * TOLERANCE


@pytest.mark.parametrize("llama", ["gqa2-tied-linear", "padded-groups-bias"])
def test_ranks_that_pad_and_copy_heads(llama: str, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES[llama])
    check(tiny, Quantization(format="int8_per_channel"), 4, fuses_qkv=True)


def test_skipped_modules_stay(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES["mha-bias-default"])
    quantization = Quantization(format="int8_per_tensor", skipped=("self_attn", "lm_head"))
    description = ModelChanges(quantization=quantization).apply(describe_model(tiny.checkpoint.config))
    quantized = {one.module for one in description.linears() if one.format}
    assert quantized == {"gate_proj", "up_proj", "down_proj"}
    check(tiny, quantization, 1, fuses_qkv=True)
