"""NeuronConfig: quantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from compiler_svc.config.attribute import LATER, Derivation, Support, Values, attribute
from compiler_svc.config.domains import choice
from compiler_svc.config.rule import KILN, NXDI_CODE, Note, Rule
from compiler_svc.config.tables.documents import QUANTIZATION, UNDOCUMENTED
from compiler_svc.config.tables.general import NO_SIZE
from compiler_svc.config.tables.speculation import fuse
from targets.cpu import CPU


def _type_by_kernel(values: Values) -> str:
    return "per_channel_symmetric" if values["quantized_mlp_kernel_enabled"] else "per_tensor_symmetric"


@dataclass(frozen=True, kw_only=True)
class QuantizationAttributes:
    """How weights are quantized, and which modules stay in full precision."""

    quantized: bool = attribute(QUANTIZATION, default=False)
    quantized_checkpoints_path: str | None = attribute(
        QUANTIZATION,
        neuron=NO_SIZE,
        note="a directory below a model root, whose weights the compile takes; what the configuration does not say of "
        "their quantization, they say. NxD Inference requires it; without it, a compile takes the model's own matrices",
    )
    quantization_dtype: Literal["int8", "f8e4m3", "f8e5m2", "int4", "int4_by_64", "int4_by_32"] = attribute(
        QUANTIZATION,
        default=Derivation(
            lambda values: "f8e4m3" if values["quantized_mlp_kernel_enabled"] else "int8",
            "int8; f8e4m3 with quantized_mlp_kernel_enabled",
        ),
        neuron=NO_SIZE,
        note="int4 is Kiln's own: groups of 128, 64 or 32 inputs, whatever quantization_type says; int4_by_64 and "
        "int4_by_32 have none that are larger",
    )
    quantization_type: Literal["per_tensor_symmetric", "per_channel_symmetric"] = attribute(
        QUANTIZATION,
        default=Derivation(
            _type_by_kernel, "per_tensor_symmetric; per_channel_symmetric with quantized_mlp_kernel_enabled"
        ),
    )
    activation_quantization_type: Literal["none", "dynamic", "dynamic_whole", "static"] | None = attribute(
        UNDOCUMENTED,
        choice(("none", "dynamic", "dynamic_whole", "static")),
        cpu=Support("honoured", values=("none", "dynamic", "dynamic_whole")),
        neuron=NO_SIZE,
        compiled=Support("honoured", values=("none",)),
        note="what quantized layers multiply becomes int8 for each token, or f8e4m3 with weights of f8e4m3. none and "
        "dynamic_whole are Kiln's own: activations stay whatever the checkpoint says; scales are compressed-tensors'",
    )
    modules_to_not_convert: tuple[str, ...] = attribute(QUANTIZATION, default=())
    draft_model_modules_to_not_convert: tuple[str, ...] = attribute(QUANTIZATION, default=(), cpu=LATER)


KvMethod = Literal["per_tensor_symmetric", "per_key_symmetric", "per_channel_symmetric"]


@dataclass(frozen=True, kw_only=True)
class KVQuantizationConfig:
    """How the KV cache keeps keys and values: cast, or divided by scales of the checkpoint first."""

    direct_cast: bool = attribute(UNDOCUMENTED, default=True, neuron=NO_SIZE)
    quant_dtype: Literal["float8_e4m3fn", "int8"] = attribute(
        UNDOCUMENTED,
        choice(("float8_e4m3fn", "int8"), prefix="torch."),
        default="float8_e4m3fn",
        neuron=NO_SIZE,
        note="NxD Inference takes any dtype",
    )
    k_quant_method: KvMethod = attribute(
        UNDOCUMENTED,
        default="per_tensor_symmetric",
        neuron=NO_SIZE,
        note="the checkpoint's self_attn.k_scale of each layer: [1], [KV heads, 1, 1] or [1, 1, head_dim]",
    )
    v_quant_method: KvMethod = attribute(
        UNDOCUMENTED,
        default="per_tensor_symmetric",
        neuron=NO_SIZE,
        note="self_attn.v_scale, as for keys",
    )


#: Rules on the values of a KVQuantizationConfig.
KV_QUANTIZATION_RULES: Final = (
    *(
        Rule(
            (name, "direct_cast"),
            lambda v, name=name: not v["direct_cast"] or v[name] == "per_tensor_symmetric",  # type: ignore[misc]
            "'per_tensor_symmetric', unless direct_cast is false: a cast has no scales",
            NXDI_CODE,
            breaks={name: "per_key_symmetric"},
            keeps={name: "per_key_symmetric", "direct_cast": False},
        )
        for name in ("k_quant_method", "v_quant_method")
    ),
    Rule(
        ("quant_dtype", "direct_cast"),
        lambda v: not v["direct_cast"] or v["quant_dtype"] != "int8",
        "'float8_e4m3fn', unless direct_cast is false: without scales, int8 would keep whole numbers",
        KILN,
        breaks={"quant_dtype": "int8"},
        keeps={"quant_dtype": "torch.int8", "direct_cast": False},
    ),
)

#: An example.
QUANTIZED: Final = {"quantized": True, "quantized_checkpoints_path": "quantized"}
_BYTES: Final = {"quantized": True, "activation_quantization_type": "dynamic"}

QUANTIZATION_RULES: Final = (
    Rule(
        ("quantization_dtype",),
        lambda v: v["target"] == CPU.kind or not v["quantization_dtype"].startswith("int4"),
        "'int8', 'f8e4m3' or 'f8e5m2' on NeuronCores: NxD has no groups",
        NXDI_CODE,
        breaks={"quantization_dtype": "int4"},
        keeps={"quantization_dtype": "f8e5m2"},
    ),
    Rule(
        ("activation_quantization_type", "quantization_dtype"),
        lambda v: v["quantization_dtype"] != "f8e5m2" or v["activation_quantization_type"] in (None, "none"),
        "'none' with weights of f8e5m2: activations become int8 or f8e4m3",
        KILN,
        breaks=_BYTES | {"quantization_dtype": "f8e5m2"},
        keeps=_BYTES | {"quantization_dtype": "f8e4m3"},
    ),
    Rule(
        ("draft_model_modules_to_not_convert", "quantized", "enable_fused_speculation"),
        lambda v: (
            not (v["quantized"] and v["enable_fused_speculation"]) or bool(v["draft_model_modules_to_not_convert"])
        ),
        "a list of the draft model's modules that are left in full precision, because quantized and "
        "enable_fused_speculation are true",
        QUANTIZATION,
        breaks=fuse(quantized=True, quantized_checkpoints_path="quantized"),
        keeps=fuse(
            quantized=True,
            quantized_checkpoints_path="quantized",
            draft_model_modules_to_not_convert=["lm_head"],
        ),
    ),
)

QUANTIZATION_NOTES: Final = (
    Note(
        lambda v: not v["quantized"] and v["quantized_checkpoints_path"] is not None,
        "neuron_config.quantized_checkpoints_path: it is ignored because quantized is false",
        doubtful={"quantized_checkpoints_path": "quantized"},
        plain=QUANTIZED,
    ),
    Note(
        lambda v: bool(v["modules_to_not_convert"]) and not (v["quantized"] or v["quantized_mlp_kernel_enabled"]),
        "neuron_config.modules_to_not_convert: it is ignored because quantized is false",
        doubtful={"modules_to_not_convert": ["lm_head"]},
        plain=QUANTIZED | {"modules_to_not_convert": ["lm_head"]},
    ),
    Note(
        lambda v: bool(v["draft_model_modules_to_not_convert"]) and not v["enable_fused_speculation"],
        "neuron_config.draft_model_modules_to_not_convert: it is ignored because enable_fused_speculation is false",
        doubtful={"draft_model_modules_to_not_convert": ["lm_head"]},
    ),
)
