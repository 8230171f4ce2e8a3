"""NeuronConfig: quantized weights."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import LATER, Attribute
from compiler_svc.config.domains import Choice, Flag, Text, TextList
from compiler_svc.config.tables.documents import QUANTIZATION

QUANTIZATION_ATTRIBUTES: Final = (
    Attribute(name="quantized", domain=Flag(), default=False, section=QUANTIZATION, cpu=LATER),
    Attribute(name="quantized_checkpoints_path", domain=Text(), section=QUANTIZATION, cpu=LATER),
    Attribute(
        name="quantization_dtype",
        domain=Choice(("int8", "f8e4m3", "f8e5m2")),
        default="int8",
        section=QUANTIZATION,
        cpu=LATER,
    ),
    Attribute(
        name="quantization_type",
        domain=Choice(("per_tensor_symmetric", "per_channel_symmetric")),
        default="per_tensor_symmetric",
        section=QUANTIZATION,
        cpu=LATER,
    ),
    Attribute(name="modules_to_not_convert", domain=TextList(), default=(), section=QUANTIZATION, cpu=LATER),
    Attribute(
        name="draft_model_modules_to_not_convert", domain=TextList(), default=(), section=QUANTIZATION, cpu=LATER
    ),
)
