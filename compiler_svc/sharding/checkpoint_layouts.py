"""How the checkpoints that we write keep quantized matrices: a row for each layout. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.sources import CompressedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one dtype is kept: in a format of `bundle.abi.formats`, in tensors that are named by what stands behind their
    module's name, and with what `config.json` says of it.
    """

    format: str
    parts: Mapping[str, CompressedPart]
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout:
    """A way to write checkpoints; `takes_head` says whether its readers know a head that is quantized."""

    schemes: Mapping[str, Scheme]
    takes_head: bool


def _compress(format_name: str, bits: int, kind: str, strategy: str, **scheme: Any) -> dict[str, Any]:
    """What compressed-tensors' `quantization_config` says of linear layers."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None}
    weights |= {"dynamic": False, **scheme.pop("weights", {})}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | scheme},
        "kv_cache_scheme": None,
    }


#: vLLM reads int8 of this format only where activations are quantized, too: each token by itself, as it comes.
_EACH_TOKEN: Final = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_BYTES: Final[Mapping[str, CompressedPart]] = {"weight": "items", "weight_scale": "scales"}
_WORDS: Final[Mapping[str, CompressedPart]] = {
    "weight_packed": "items",
    "weight_scale": "scales",
    "weight_zero_point": "zeros",
    "weight_shape": "shape",
}
_NXD: Final[Mapping[str, CompressedPart]] = {"weight": "items", "scale": "scales"}

LAYOUTS: Final[Mapping[str, CheckpointLayout]] = {
    "compressed-tensors": CheckpointLayout(
        takes_head=False,
        schemes={
            "int8": Scheme(
                format="int8_per_channel",
                parts=_BYTES,
                config=_compress("int-quantized", 8, "int", "channel", input_activations=_EACH_TOKEN),
            ),
            "f8e4m3": Scheme(
                format="f8e4m3_per_channel",
                parts=_BYTES,
                config=_compress("float-quantized", 8, "float", "channel"),
            ),
            "int4": Scheme(
                format="int4_by_128",
                parts=_WORDS,
                config=_compress("pack-quantized", 4, "int", "group", weights={"symmetric": False, "group_size": 128}),
            ),
        },
    ),
    "nxd": CheckpointLayout(
        takes_head=True,
        schemes={dtype: Scheme(format=f"{dtype}_per_channel", parts=_NXD) for dtype in ("int8", "f8e4m3", "f8e5m2")},
    ),
}
#: Every dtype, in the order of the layouts.
DTYPES: Final = tuple(dict.fromkeys(dtype for layout in LAYOUTS.values() for dtype in layout.schemes))


def describe(scheme: Scheme, plain: Sequence[str], left_out: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What `config.json` gains: linear layers that stay as they are, and all in modules that the model leaves out."""
    if scheme.config is not None:
        yield "quantization_config", {**scheme.config, "ignore": [*plain, *(f"re:{name}\\..*" for name in left_out)]}
