"""How checkpoints keep quantized matrices: their `quantization_config` says by which method. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from bundle.abi.tensor import DType
from compiler_svc.models.attributes import AttributeReader

_NAME: Final = "quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a checkpoint keeps each quantized matrix [outputs, inputs]: in several tensors, named after its module.

    A weight is its item less its zero point, times its scale. Items lie as they are, or as some bits of a word.

    Attributes:
        items: What the tensor of items is called behind the module's name.
        scales: What that of the scales may be called: [outputs, groups of inputs], or fewer where they are equal.
        zeros: What that of zero points is called, if there is one; they lie as scales do.
        groups: What that of the group of each input is called, if there is one.
        required: Those of zero points and groups that every matrix has, or it would be read as another one.
        bits: Bits of an item that is part of a word; 0 if items are whole.
        word: Dtype of the words.
        items_per_word: Items of a word; of one alone, the high bits repeat its sign.
        is_signed: Whether items of words are in two's complement; they are read as if half their range were added.
        packed: The axis along which items share a word. Zero points do so along outputs.
        order: Where in a word each item is, in items from the low bits; none: the first one has the low bits.
        transposed: Tensors that have the axes the other way round; zero points lie as scales do.
        zero: The zero point of all items, where no tensor has any.
        zero_offset: What to add to those of a tensor.
        zero_means: What a tensor of zero points has: items; weights, which are added to the products with scales; or
            nothing but zeros.
        is_flattened: Whether a library's own tensors are taken apart for safetensors; pickles have them whole.
        block: Outputs and inputs that share a scale, if the tensor's shape does not say so.
        activations: What layers make of the rows that they multiply: int8 or float8, each row by itself as it comes;
            something else; or nothing.
    """

    items: str = "weight"
    scales: tuple[str, ...] = ("weight_scale",)
    zeros: str = "weight_zero_point"
    groups: str = "weight_g_idx"
    required: tuple[str, ...] = ()
    bits: int = 0
    word: DType = "int32"
    items_per_word: int = 1
    is_signed: bool = False
    packed: Literal["inputs", "outputs"] = "inputs"
    order: tuple[int, ...] = ()
    transposed: tuple[Literal["items", "scales"], ...] = ()
    zero: int = 0
    zero_offset: int = 0
    zero_means: Literal["item", "weight", "none"] = "item"
    is_flattened: bool = False
    block: tuple[int, int] | None = None
    activations: Literal["", "int", "float", "other"] = ""


_COMPRESSED: Final = Packing()
_COMPRESSED_WORDS: Final = Packing(items="weight_packed")
_FP8: Final = Packing(scales=("weight_scale_inv", "weight_scale"))
_GPTQ: Final = Packing(
    items="qweight",
    scales=("scales",),
    zeros="qzeros",
    groups="g_idx",
    required=("qzeros",),
    transposed=("items", "scales"),
    zero_offset=1,
)
#: Of eight items, those with even numbers are in the lower half.
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ: Final = replace(_GPTQ, packed="outputs", order=_AWQ_ORDER, zero_offset=0)

#: A tensor `weight` of torchao's becomes several; zero points are there even if all of them are 0.
_TORCHAO: Final = Packing(
    items="_weight_qdata",
    scales=("_weight_scale",),
    zeros="_weight_zero_point",
    groups="",
    zero_means="none",
    is_flattened=True,
)
_TORCHAO_WORDS: Final = replace(_TORCHAO, word="int8", is_signed=True)

#: Of a checkpoint that says nothing: NxD's quantized state dictionaries have no configuration.
UNSAID: Final = Packing(scales=("scale", "weight_scale"))
#: Values of `format` of compressed-tensors, by whether items share an int32.
_FORMATS: Final = {
    "naive-quantized": False,
    "int-quantized": False,
    "float-quantized": False,
    "pack-quantized": True,
}
#: What its `input_activations` say where each token is quantized by itself.
_EACH_TOKEN: Final[Mapping[str, Any]] = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
#: Values of its `actorder` with which inputs are in groups of any order.
_ACTIVATION_ORDERS: Final = ("group", "dynamic", True)


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
    required = set.intersection(*(set(one.required) for one in packings))
    first, *others = {replace(one, required=tuple(required)) for one in packings}
    if others:
        reader.note_not_served("config_groups", list(groups), "groups whose weights have the same bits")
    kinds = {_name_activations(_as_object(_as_object(one).get("input_activations"))) for one in groups.values()}
    return replace(first, activations=kinds.pop() if len(kinds) == 1 else "other")


def _name_activations(given: Mapping[str, Any]) -> Literal["", "int", "float", "other"]:
    """How a group quantizes activations."""
    if not given:
        return ""
    said = {"num_bits": 8, "symmetric": True, **given}
    if not _EACH_TOKEN.items() <= said.items():
        return "other"
    return "float" if said.get("type") == "float" else "int"


def _read_group(group: AttributeReader, *, is_packed: bool) -> Packing:
    weights = group.nested("weights", _as_object(group.values.get("weights")))
    weights.choice("type", "int", ("int",) if is_packed else ("int", "float"))
    bits = _read_bits(weights, "num_bits", *((8, 4) if is_packed else (8,)))
    packing = replace(_share_words(_COMPRESSED_WORDS, bits), zero=1 << (bits - 1)) if is_packed else _COMPRESSED
    has_zeros = not weights.boolean("symmetric", True)
    has_groups = weights.values.get("actorder") in _ACTIVATION_ORDERS
    required = [name for name, is_there in ((packing.zeros, has_zeros), (packing.groups, has_groups)) if is_there]
    return replace(packing, block=_read_block(weights, "block_structure"), required=tuple(required))


def _read_fp8(reader: AttributeReader) -> Packing:
    return replace(_FP8, block=_read_block(reader, "weight_block_size"))


def _read_gptq(reader: AttributeReader) -> Packing:
    version = reader.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    # Without activation order, inputs are in groups as they come, and the tensor that says so need not be read.
    groups = (_GPTQ.groups,) if reader.boolean("desc_act", False) else ()
    return replace(
        _share_words(_GPTQ, _read_bits(reader, "bits", 4, 2, 8)),
        groups="".join(groups),
        required=(*_GPTQ.required, *groups),
        zero_offset=1 if version == "gptq" else 0,
    )


def _read_awq(reader: AttributeReader) -> Packing:
    version = reader.values.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        reader.note_not_served("version", version, "gemm")
    return _share_words(_AWQ, _read_bits(reader, "bits", 4))


def _share_words(packing: Packing, bits: int) -> Packing:
    return replace(packing, bits=bits, items_per_word=32 // bits)


def _read_torchao(reader: AttributeReader) -> Packing:
    given = reader.values.get("quant_type")
    if not isinstance(given, Mapping):
        reader.note_not_served("quant_type", given, "the object that torchao writes with its safetensors files")
        return _TORCHAO
    config = _as_object(given.get("default"))
    kind = reader.nested("quant_type.default", config).choice("_type", "", _TORCHAO_KINDS)
    options = {name: _name_option(one) for name, one in _as_object(config.get("_data")).items()}
    return _TORCHAO_KINDS.get(kind, _read_whole)(reader.nested("quant_type.default._data", options))


def _name_option(value: object) -> object:
    """The name of an enumeration's value or of a dtype, which torchao keeps in an object."""
    return value["_data"] if isinstance(value, Mapping) and isinstance(value.get("_data"), str) else value


def _read_whole(_: AttributeReader) -> Packing:
    return _TORCHAO


def _read_intx(options: AttributeReader) -> Packing:
    """Items of any bits, each in an int8."""
    options.choice("intx_packing_format", "UNPACKED_TO_INT8", ("UNPACKED_TO_INT8",))
    bits = int(options.choice("weight_dtype", "int8", [f"int{bits}" for bits in range(2, 9)]).removeprefix("int"))
    packing = _TORCHAO if bits == 8 else replace(_TORCHAO_WORDS, bits=bits, zero=1 << (bits - 1))
    mappings = {options.values.get(name) for name in ("mapping_type", "weight_mapping_type")}
    return replace(packing, zero_means="item", required=(packing.zeros,)) if "ASYMMETRIC" in mappings else packing


def _read_int4(options: AttributeReader) -> Packing:
    """Two items in each int8, with scales and what to add [groups, outputs]."""
    options.choice("int4_packing_format", "PLAIN", ("PLAIN",))
    packing = replace(_TORCHAO_WORDS, bits=4, items_per_word=2, transposed=("scales",), zero=8)
    return replace(packing, zero_means="weight", required=(packing.zeros,))


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
    "torchao": _read_torchao,
}
#: By the class of torchao's configuration. Those that quantize activations, too, are read for their weights.
_TORCHAO_KINDS: Final[Mapping[str, Callable[[AttributeReader], Packing]]] = {
    "Int8WeightOnlyConfig": _read_whole,
    "Int8DynamicActivationInt8WeightConfig": _read_whole,
    "Float8WeightOnlyConfig": _read_whole,
    "Float8DynamicActivationFloat8WeightConfig": _read_whole,
    "IntxWeightOnlyConfig": _read_intx,
    "Int8DynamicActivationIntxWeightConfig": _read_intx,
    "Int4WeightOnlyConfig": _read_int4,
}
