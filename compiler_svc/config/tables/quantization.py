"""NeuronConfig: quantized weights."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import LATER, Attribute, Values
from compiler_svc.config.domains import Choice, Flag, Text, TextList
from compiler_svc.config.tables.documents import QUANTIZATION


def _type_by_kernel(values: Values) -> str:
    return "per_channel_symmetric" if values["quantized_mlp_kernel_enabled"] else "per_tensor_symmetric"


QUANTIZATION_ATTRIBUTES: Final = (
    Attribute(name="quantized", domain=Flag(), default=False, section=QUANTIZATION, cpu=LATER),
    Attribute(name="quantized_checkpoints_path", domain=Text(), section=QUANTIZATION, cpu=LATER),
    Attribute(
        name="quantization_dtype",
        domain=Choice(("int8", "f8e4m3", "f8e5m2")),
        default=lambda values: "f8e4m3" if values["quantized_mlp_kernel_enabled"] else "int8",
        derivation="int8; f8e4m3 with quantized_mlp_kernel_enabled",
        section=QUANTIZATION,
        cpu=LATER,
    ),
    Attribute(
        name="quantization_type",
        domain=Choice(("per_tensor_symmetric", "per_channel_symmetric")),
        default=_type_by_kernel,
        derivation="per_tensor_symmetric; per_channel_symmetric with quantized_mlp_kernel_enabled",
        section=QUANTIZATION,
        cpu=LATER,
    ),
    Attribute(name="modules_to_not_convert", domain=TextList(), default=(), section=QUANTIZATION, cpu=LATER),
    Attribute(
        name="draft_model_modules_to_not_convert", domain=TextList(), default=(), section=QUANTIZATION, cpu=LATER
    ),
)
