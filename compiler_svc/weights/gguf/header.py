"""The header of a GGUF file: metadata, and where its tensors are. Nothing is taken for granted of the bytes."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from compiler_svc.weights.errors import CheckpointInvalid

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
#: The two words that follow the magic count tensors and metadata.
_COUNTS: Final = "<IQQ"
#: Least bytes of an entry: a name of no character, and what follows it.
_LEAST_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8
_LEAST_FIELD_BYTES: Final = 8 + 4 + 1
_MAX_DIMENSIONS: Final = 4
_MAX_NAME_BYTES: Final = 1 << 16
_ALIGNMENT: Final = "general.alignment"
_FLOAT32: Final = 6
_STRING: Final = 8
_ARRAY: Final = 9
#: Formats of numbers, by the type of a value.
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_CUT: Final = "ends within its header"
_WHOLE: Final = "a whole GGUF file"


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor keeps its values: so many in a block of so many bytes; `dtype` is torch's name of floats."""

    name: str
    items: int
    size_bytes: int
    dtype: str = ""
    is_four_bit: bool = False


#: By the number in the file. Others are refused: transformers reads none of them.
BLOCK_TYPES: Final = {
    0: BlockType("F32", 1, 4, "float32"),
    1: BlockType("F16", 1, 2, "float16"),
    2: BlockType("Q4_0", 32, 18, is_four_bit=True),
    3: BlockType("Q4_1", 32, 20, is_four_bit=True),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144, is_four_bit=True),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, "bfloat16"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it: the number of its type, its shape in torch's order, and where its bytes are."""

    name: str
    number: int
    shape: tuple[int, ...]
    start_byte: int

    @property
    def type(self) -> BlockType:
        """How it keeps its values."""
        return BLOCK_TYPES[self.number]

    @property
    def size_bytes(self) -> int:
        """Bytes of its blocks."""
        return math.prod(self.shape) // self.type.items * self.type.size_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata, and tensors by name. Long arrays are None in the metadata."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


#: Items of an array that is kept: a vocabulary has more, and only the tokenizer's converter reads it.
_MAX_KEPT_ITEMS: Final = 1024


def is_gguf(file: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def read_header(file: Path) -> GgufHeader:
    """Reads the header of a GGUF file; raises CheckpointInvalid if anything in it leads out of the file."""
    with file.open("rb") as opened:
        size_bytes = file.stat().st_size
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(file, data, size_bytes).read()


def _shorten(number: float) -> float:
    """The number with the fewest digits among those that are this one in 32 bits, as a `config.json` would have it.

    Graphs have it in 64 bits, so a model has the same ones whichever form its checkpoint has.
    """
    short = (float(f"{number:.{digits}g}") for digits in range(1, 9))
    return next((one for one in short if struct.pack("<f", one) == struct.pack("<f", number)), number)


class _Reader:
    def __init__(self, file: Path, data: mmap.mmap, size_bytes: int) -> None:
        self._file, self._data, self._size_bytes = file, data, size_bytes
        self._position = len(MAGIC)

    def read(self) -> GgufHeader:
        version, num_tensors, num_fields = self._numbers(_COUNTS)
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            value = "big-endian numbers" if is_swapped else f"version {version}"
            self._refuse("version", value, f"version {' or '.join(map(str, _VERSIONS))}, little-endian")
        self._check_count("tensors", num_tensors, _LEAST_TENSOR_BYTES)
        self._check_count("metadata", num_fields, _LEAST_FIELD_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._name("metadata")
            if key in metadata:
                self._refuse(key, "two values", "one value")
            (kind,) = self._numbers("<I")
            metadata[key] = self._value(key, kind)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            self._refuse(_ALIGNMENT, repr(alignment), "a multiple of 8")
        start_byte = -(-self._position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, number, shape, offset_bytes in entries:
            if name in tensors:
                self._refuse(name, "two tensors", "one tensor of a name")
            tensors[name] = self._place(StoredTensor(name, number, shape, start_byte + offset_bytes), alignment)
        return GgufHeader(metadata, tensors)

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._name("tensors")
        (num_dimensions,) = self._numbers("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._refuse(name, f"{num_dimensions} dimensions", f"1 to {_MAX_DIMENSIONS} dimensions")
        dimensions = self._numbers(f"<{num_dimensions}Q")
        number, offset_bytes = self._numbers("<IQ")
        return name, number, dimensions[::-1], offset_bytes

    def _place(self, tensor: StoredTensor, alignment: int) -> StoredTensor:
        if tensor.number not in BLOCK_TYPES:
            names = ", ".join(one.name for one in BLOCK_TYPES.values())
            accepted = f"{names}; or another file of the model"
            self._refuse(tensor.name, f"type {tensor.number}", accepted)
        if not all(tensor.shape) or tensor.shape[-1] % tensor.type.items:
            accepted = f"rows of whole blocks of {tensor.type.items}, as {tensor.type.name} has"
            self._refuse(tensor.name, f"shape {list(tensor.shape)}", accepted)
        if tensor.start_byte % alignment:
            self._refuse(tensor.name, f"begins at byte {tensor.start_byte}", f"a multiple of {alignment}")
        end_byte = tensor.start_byte + tensor.size_bytes
        if end_byte > self._size_bytes:
            self._refuse(tensor.name, f"ends at byte {end_byte} of {self._size_bytes}", _WHOLE)
        return tensor

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            (number,) = self._numbers(f"<{_NUMBERS[kind]}")
            return _shorten(number) if kind == _FLOAT32 else number
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            self._refuse(key, f"a value of type {kind}", "a number, a string, or an array of either")
        item, count = self._numbers("<IQ")
        if item in _NUMBERS:
            item_bytes = struct.calcsize(_NUMBERS[item])
            self._check_count(key, count, item_bytes)
            if count <= _MAX_KEPT_ITEMS:
                return list(self._numbers(f"<{count}{_NUMBERS[item]}"))
            self._position += count * item_bytes
            return None
        if item != _STRING:
            self._refuse(key, f"an array of type {item}", "an array of numbers or strings")
        self._check_count(key, count, 8)
        if count <= _MAX_KEPT_ITEMS:
            return [self._text(key) for _ in range(count)]
        for _ in range(count):
            self._skip_text(key)
        return None

    def _name(self, subject: str) -> str:
        return self._text(subject, _MAX_NAME_BYTES)

    def _text(self, subject: str, limit: int | None = None) -> str:
        start = self._position + 8
        self._skip_text(subject, limit)
        try:
            return self._data[start : self._position].decode()
        except UnicodeDecodeError as error:
            self._refuse(subject, f"a string that is no UTF-8 ({error.reason})", "UTF-8")

    def _skip_text(self, subject: str, limit: int | None = None) -> None:
        (length,) = self._numbers("<Q")
        if length > (self._size_bytes - self._position if limit is None else limit):
            self._refuse(subject, f"a string of {length} bytes", "strings that the file holds")
        self._position += length
        if self._position > self._size_bytes:
            self._refuse(self._file.name, _CUT, _WHOLE)

    def _numbers(self, form: str) -> tuple[Any, ...]:
        size_bytes = struct.calcsize(form)
        if self._position + size_bytes > self._size_bytes:
            self._refuse(self._file.name, _CUT, _WHOLE)
        numbers = struct.unpack_from(form, self._data, self._position)
        self._position += size_bytes
        return numbers

    def _check_count(self, subject: str, count: int, least_bytes: int) -> None:
        most = (self._size_bytes - self._position) // least_bytes
        if count > most:
            self._refuse(subject, f"{count} entries", f"at most {most}, which the rest of the file could hold")

    def _refuse(self, subject: str, value: str, accepted: str) -> NoReturn:
        raise CheckpointInvalid(self._file, subject, value, accepted)
