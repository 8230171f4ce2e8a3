"""How checkpoints keep quantized matrices: their `quantization_config` says by which method. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from compiler_svc.models.attributes import AttributeReader

_NAME: Final = "quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a checkpoint keeps each quantized matrix [outputs, inputs]: in several tensors, named after its module.

    A weight is its item less its zero point, times its scale. Items lie as they are, or several in each int32.

    Attributes:
        items: What the tensor of items is called behind the module's name.
        scales: What that of the scales may be called: [outputs, groups of inputs], or fewer where they are equal.
        zeros: What that of zero points is called, if there is one; they lie as scales do.
        groups: What that of the group of each input is called, if there is one.
        bits: Bits of an item that shares an int32; 0 if none does.
        packed: The axis along which items share an int32. Zero points do so along outputs.
        order: Where in an int32 each item is, in items from the low bits; none: the first one has the low bits.
        is_transposed: Whether tensors have the axes the other way round.
        zero: The zero point of all items, where no tensor has any.
        zero_offset: What to add to those of a tensor.
        block: Outputs and inputs that share a scale, if the tensor's shape does not say so.
    """

    items: str = "weight"
    scales: tuple[str, ...] = ("weight_scale",)
    zeros: str = "weight_zero_point"
    groups: str = "weight_g_idx"
    bits: int = 0
    packed: Literal["inputs", "outputs"] = "inputs"
    order: tuple[int, ...] = ()
    is_transposed: bool = False
    zero: int = 0
    zero_offset: int = 0
    block: tuple[int, int] | None = None

    @property
    def items_per_word(self) -> int:
        """Items of an int32."""
        return 32 // self.bits


_COMPRESSED: Final = Packing()
_COMPRESSED_WORDS: Final = Packing(items="weight_packed")
_FP8: Final = Packing(scales=("weight_scale_inv", "weight_scale"))
_GPTQ: Final = Packing(
    items="qweight", scales=("scales",), zeros="qzeros", groups="g_idx", is_transposed=True, zero_offset=1
)
#: Of eight items, those with even numbers are in the lower half.
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ: Final = replace(_GPTQ, packed="outputs", order=_AWQ_ORDER, zero_offset=0)

#: Of a checkpoint that says nothing: NxD's quantized state dictionaries have no configuration.
UNSAID: Final = Packing(scales=("scale", "weight_scale"))
#: Values of `format` of compressed-tensors, by whether items share an int32.
_FORMATS: Final = {
    "naive-quantized": False,
    "int-quantized": False,
    "float-quantized": False,
    "pack-quantized": True,
}


def read_packing(model: AttributeReader) -> Packing | None:
    """Reads how a checkpoint keeps quantized matrices; None if it has none. Mistakes are noted in `model`."""
    given = model.values.get(_NAME)
    if not given:
        return None
    if not isinstance(given, Mapping):
        model.note_invalid(_NAME, given, "an object")
        return None
    method, reader = given.get("quant_method"), model.nested(_NAME, given)
    if not isinstance(method, str) or method not in _METHODS:
        served = f"{', '.join(_METHODS)}; or the checkpoint before it was quantized, with neuron_config.quantized"
        reader.note_not_served("quant_method", method, served)
        return None
    return _METHODS[method](reader)


def _read_compressed(reader: AttributeReader) -> Packing:
    is_packed = _FORMATS[reader.choice("format", "naive-quantized", _FORMATS)]
    sparsity = _as_object(reader.values.get("sparsity_config")).get("format", "dense")
    if sparsity != "dense":
        reader.note_not_served("sparsity_config.format", sparsity, "dense")
    groups = reader.values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        reader.note_invalid("config_groups", groups, "an object with at least one group")
        return _COMPRESSED
    packings = [
        _read_group(reader.nested(f"config_groups.{name}", _as_object(one)), is_packed=is_packed)
        for name, one in groups.items()
    ]
    if len(set(packings)) > 1:
        reader.note_not_served("config_groups", list(groups), "groups whose weights have the same bits")
    return packings[0]


def _read_group(group: AttributeReader, *, is_packed: bool) -> Packing:
    weights = group.nested("weights", _as_object(group.values.get("weights")))
    weights.choice("type", "int", ("int",) if is_packed else ("int", "float"))
    bits = _read_bits(weights, "num_bits", *((8, 4) if is_packed else (8,)))
    block = _read_block(weights, "block_structure")
    if is_packed:
        return replace(_COMPRESSED_WORDS, bits=bits, zero=1 << (bits - 1), block=block)
    return replace(_COMPRESSED, block=block)


def _read_fp8(reader: AttributeReader) -> Packing:
    return replace(_FP8, block=_read_block(reader, "weight_block_size"))


def _read_gptq(reader: AttributeReader) -> Packing:
    version = reader.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    # Without activation order, inputs are in groups as they come, and the tensor that says so need not be read.
    groups = _GPTQ.groups if reader.boolean("desc_act", False) else ""
    return replace(
        _GPTQ, bits=_read_bits(reader, "bits", 4, 2, 8), groups=groups, zero_offset=1 if version == "gptq" else 0
    )


def _read_awq(reader: AttributeReader) -> Packing:
    version = reader.values.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        reader.note_not_served("version", version, "gemm")
    return replace(_AWQ, bits=_read_bits(reader, "bits", 4))


def _read_bits(reader: AttributeReader, name: str, *served: int) -> int:
    """One of the numbers that are served, the first of which is the default and stands in for any other."""
    bits = reader.integer(name, served[0])
    if bits not in served:
        reader.note_not_served(name, bits, " or ".join(map(str, sorted(served))))
        return served[0]
    return bits


def _read_block(reader: AttributeReader, name: str) -> tuple[int, int] | None:
    given = reader.values.get(name)
    if given is None:
        return None
    if isinstance(given, list) and len(given) == 2 and all(type(one) is int and one > 0 for one in given):
        return given[0], given[1]
    reader.note_invalid(name, given, "a list of two positive integers")
    return None


def _as_object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


#: By `quant_method`.
_METHODS: Final[Mapping[str, Callable[[AttributeReader], Packing]]] = {
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "awq": _read_awq,
}
