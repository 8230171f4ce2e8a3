"""The dtypes of tensors, and the common part of inputs and outputs: a tensor whose dimensions are symbols."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from bundle.abi.submodels import SUBMODELS, SubmodelName

DType = Literal["float32", "bfloat16", "float16", "int32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"]


@dataclass(frozen=True, slots=True)
class ItemType:
    """How a dtype's items are stored, and what others call it.

    Attributes:
        safetensors: Its name in the header of a safetensors file.
        nrt: Its `nrt_dtype_t` (nrt.h).
        metaneff: Its `MetaTensor.DataType`, in what Neuron's tracer says of a graph's tensors.
    """

    size_bytes: int
    safetensors: str
    nrt: int
    metaneff: int


#: Every dtype that a tensor of a bundle may have, by torch's name.
DTYPES: Final[Mapping[DType, ItemType]] = {
    "float32": ItemType(4, "F32", nrt=0xA, metaneff=1),
    "bfloat16": ItemType(2, "BF16", nrt=0x6, metaneff=14),
    "float16": ItemType(2, "F16", nrt=0x7, metaneff=12),
    "int32": ItemType(4, "I32", nrt=0x8, metaneff=2),
    "int8": ItemType(1, "I8", nrt=0x2, metaneff=7),
    "uint8": ItemType(1, "U8", nrt=0x3, metaneff=6),
    "float8_e4m3fn": ItemType(1, "F8_E4M3", nrt=0xE, metaneff=15),
    "float8_e5m2": ItemType(1, "F8_E5M2", nrt=0xF, metaneff=16),
}

#: A number that each executable has its own value of.
#:
#: R                 rows of a step
#: T                 tokens of a row
#: K                 tokens of a row that have outputs: 1, or as many as a speculative step verifies
#: L                 likeliest tokens that are told of each token of a prompt
#: H                 numbers of a hidden state, as the head of the model takes it
#: N                 blocks of a row's block table
#: V                 vocabulary size
#: rank_V            vocabulary of one rank: its share of V, rounded up
#: W                 words of 32 bits that have a bit for each token: V / 32, rounded up
#: B                 tokens of a row whose logits a processor changes one by one: as many as a row may ask for
#: pad_id            token id of padding
#: scratch_slot      KV slot of idle rows: one behind those that requests hold, whether the cache has it or not
#: scratch_block     KV block of padding and of idle rows; the last one
#: scratch_place     first place of the scratch block: its number times the tokens of a block
#: last_place        last place of the scratch block
#: last_token_id     largest token id
#: last_position     largest position that a token may have
#: last_adapter      last slot of the weights of adapters
Symbol = Literal[
    "R",
    "T",
    "K",
    "L",
    "H",
    "N",
    "V",
    "rank_V",
    "W",
    "B",
    "pad_id",
    "scratch_slot",
    "scratch_block",
    "scratch_place",
    "last_place",
    "last_token_id",
    "last_position",
    "last_adapter",
]
Symbols = Mapping[Symbol, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbiTensor:
    """One input or output.

    Attributes:
        dtype: `computed` is the dtype of the executable's computation, which is that of its state.
        dims: K is left out of executables for which it is 1.
        flag: Only executables with this flag have the tensor; None: all executables of its submodels have it.
        unless: Executables with this flag do not have the tensor.
    """

    name: str
    dtype: Literal["int32", "float32", "computed"]
    dims: tuple[Symbol | int, ...]
    flag: str | None = None
    unless: str | None = None
    submodels: tuple[SubmodelName, ...] = tuple(SUBMODELS)

    def shape(self, symbols: Symbols) -> tuple[int, ...]:
        """Computes the static shape in one executable. Of the symbols, only those in `dims` need values."""
        return tuple(
            dim if isinstance(dim, int) else symbols[dim] for dim in self.dims if dim != "K" or symbols["K"] > 1
        )

    def belongs_to(self, submodel: SubmodelName, flags: Collection[str]) -> bool:
        """Whether executables of a submodel have this tensor. Flags of other submodels are ignored."""
        return submodel in self.submodels and (self.flag is None or self.flag in flags) and self.unless not in flags
