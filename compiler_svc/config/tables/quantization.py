"""NeuronConfig: quantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compiler_svc.config.attribute import LATER, Derivation, Values, attribute
from compiler_svc.config.tables.documents import QUANTIZATION
from compiler_svc.config.tables.general import NO_SIZE


def _type_by_kernel(values: Values) -> str:
    return "per_channel_symmetric" if values["quantized_mlp_kernel_enabled"] else "per_tensor_symmetric"


@dataclass(frozen=True, kw_only=True)
class QuantizationAttributes:
    """How weights are quantized, and which modules stay in full precision."""

    quantized: bool = attribute(QUANTIZATION, default=False, cpu=LATER)
    quantized_checkpoints_path: str | None = attribute(QUANTIZATION, cpu=LATER, neuron=NO_SIZE)
    quantization_dtype: Literal["int8", "f8e4m3", "f8e5m2"] = attribute(
        QUANTIZATION,
        default=Derivation(
            lambda values: "f8e4m3" if values["quantized_mlp_kernel_enabled"] else "int8",
            "int8; f8e4m3 with quantized_mlp_kernel_enabled",
        ),
        cpu=LATER,
        neuron=NO_SIZE,
    )
    quantization_type: Literal["per_tensor_symmetric", "per_channel_symmetric"] = attribute(
        QUANTIZATION,
        default=Derivation(
            _type_by_kernel, "per_tensor_symmetric; per_channel_symmetric with quantized_mlp_kernel_enabled"
        ),
        cpu=LATER,
    )
    modules_to_not_convert: tuple[str, ...] = attribute(QUANTIZATION, default=(), cpu=LATER)
    draft_model_modules_to_not_convert: tuple[str, ...] = attribute(QUANTIZATION, default=(), cpu=LATER)
