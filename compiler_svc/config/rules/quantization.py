"""Rules on quantized weights."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.rules.rule import Note, Rule
from compiler_svc.config.tables.documents import QUANTIZATION

QUANTIZATION_RULES: Final = (
    Rule(
        ("quantized_checkpoints_path", "quantized"),
        lambda v: not v["quantized"] or bool(v["quantized_checkpoints_path"]) or v.get("quantizes_at_load", False),
        "the path of the quantized checkpoint, because quantized is true",
        QUANTIZATION,
    ),
    Rule(
        ("draft_model_modules_to_not_convert", "quantized", "enable_fused_speculation"),
        lambda v: (
            not (v["quantized"] and v["enable_fused_speculation"]) or bool(v["draft_model_modules_to_not_convert"])
        ),
        "a list of the draft model's modules that are left in full precision, because quantized and "
        "enable_fused_speculation are true",
        QUANTIZATION,
    ),
)

QUANTIZATION_NOTES: Final = (
    Note(
        lambda v: not v["quantized"] and v["quantized_checkpoints_path"] is not None,
        "neuron_config.quantized_checkpoints_path: it is ignored because quantized is false",
    ),
    Note(
        lambda v: bool(v["modules_to_not_convert"]) and not (v["quantized"] or v["quantized_mlp_kernel_enabled"]),
        "neuron_config.modules_to_not_convert: it is ignored because quantized is false",
    ),
    Note(
        lambda v: bool(v["draft_model_modules_to_not_convert"]) and not v["enable_fused_speculation"],
        "neuron_config.draft_model_modules_to_not_convert: it is ignored because enable_fused_speculation is false",
    ),
)
