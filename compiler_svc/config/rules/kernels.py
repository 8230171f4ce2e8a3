"""Rules on kernels. They hold on targets without the kernels, too: validity does not depend on the target."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.rules.rule import NXDI_CODE, Rule
from compiler_svc.config.tables.documents import KERNELS, QUANTIZATION


def _leaves_projections_unquantized(values: Values) -> bool:
    """Whether weights are quantized and a kernel is on that takes whole ones."""
    quantizes = values["quantized"] or values["quantized_mlp_kernel_enabled"]
    takes_whole_mlp = values["mlp_kernel_enabled"] and not values["quantized_mlp_kernel_enabled"]
    return quantizes and (values["qkv_kernel_enabled"] or takes_whole_mlp)


KERNEL_RULES: Final = (
    Rule(
        ("qkv_kernel_enabled", "fused_qkv"),
        lambda v: not v["qkv_kernel_enabled"] or v["fused_qkv"],
        "false, unless fused_qkv is true",
        KERNELS,
    ),
    Rule(
        ("qkv_kernel_enabled", "torch_dtype"),
        lambda v: not v["qkv_kernel_enabled"] or v["torch_dtype"] == "bfloat16",
        "false, unless torch_dtype is 'bfloat16'; it is {torch_dtype}",
        KERNELS,
    ),
    Rule(
        ("mlp_kernel_enabled", "torch_dtype"),
        lambda v: not v["mlp_kernel_enabled"] or v["torch_dtype"] == "bfloat16",
        "false, unless torch_dtype is 'bfloat16'; it is {torch_dtype}",
        KERNELS,
    ),
    Rule(
        ("quantized_mlp_kernel_enabled", "mlp_kernel_enabled"),
        lambda v: not v["quantized_mlp_kernel_enabled"] or v["mlp_kernel_enabled"],
        "false, unless mlp_kernel_enabled is true",
        KERNELS,
    ),
    Rule(
        ("rmsnorm_quantize_kernel_enabled", "quantized_mlp_kernel_enabled"),
        lambda v: not v["rmsnorm_quantize_kernel_enabled"] or v["quantized_mlp_kernel_enabled"],
        "false, unless quantized_mlp_kernel_enabled is true",
        NXDI_CODE,
    ),
    Rule(
        ("quantization_type", "quantized_mlp_kernel_enabled"),
        lambda v: not v["quantized_mlp_kernel_enabled"] or v["quantization_type"] == "per_channel_symmetric",
        "'per_channel_symmetric', the only type of the quantized MLP kernel",
        NXDI_CODE,
    ),
    Rule(
        ("quantization_dtype", "quantized_mlp_kernel_enabled"),
        lambda v: not v["quantized_mlp_kernel_enabled"] or v["quantization_dtype"] == "f8e4m3",
        "'f8e4m3', the only dtype of the quantized MLP kernel",
        NXDI_CODE,
    ),
    Rule(
        (
            "modules_to_not_convert",
            "quantized",
            "qkv_kernel_enabled",
            "mlp_kernel_enabled",
            "quantized_mlp_kernel_enabled",
        ),
        lambda v: bool(v["modules_to_not_convert"]) or not _leaves_projections_unquantized(v),
        "a list of the modules that are left in full precision: weights are quantized, and a QKV or MLP kernel is on "
        "that takes them whole",
        QUANTIZATION,
    ),
)
