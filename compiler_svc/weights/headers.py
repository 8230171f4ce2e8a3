"""Reads the headers of a checkpoint's weight files: names, dtypes and shapes of its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from bundle.abi.tensor import DTYPES
from bundle.errors import FieldViolation
from bundle.host.shortage import find_shortage
from compiler_svc.weights.directory import CheckpointDirectory
from compiler_svc.weights.errors import CheckpointInvalid

#: Of the name of a weight file, by what the name of an index begins with.
_SUFFIXES: Final = {"model.safetensors": ".safetensors", "pytorch_model.bin": ".bin"}

#: torch's names of the dtypes that a checkpoint may hold; other dtypes keep the file's name in lower case.
_NAMES: Final = {"BOOL": "bool", "U8": "uint8", "I16": "int16", "I64": "int64", "F64": "float64"} | {
    item.safetensors: str(name) for name, item in DTYPES.items()
}

#: Dtypes of tensors that can be cast to a computation dtype.
CASTABLE_DTYPES: Final = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The header of one tensor in a checkpoint; its dtype by torch's name, such as `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def is_empty(self) -> bool:
        """Whether it has no items."""
        return 0 in self.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of its items: as many bits each as the dtype's name says, or 8."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (8 if bits is None else int(bits[0])) // 8


def read_weight_map(directory: CheckpointDirectory, index: str) -> dict[str, Path]:
    """Reads which file holds each tensor, by the tensor's name, from an index."""
    weight_map = directory.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        kind = "nothing" if not weight_map else f"a {type(weight_map).__name__}"
        raise CheckpointInvalid(directory.path, f"{index}: weight_map", kind, "tensor names with file names")
    suffix = _SUFFIXES[index.removesuffix(".index.json")]
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not is_plain_name(file_name) or not file_name.endswith(suffix):
            accepted = f"the name of a {suffix} file in the checkpoint directory"
            raise CheckpointInvalid(directory.path, f"{index}: weight_map[{name}]", repr(file_name), accepted)
    files = directory.files(dict.fromkeys(weight_map.values()))
    return {name: files[file_name] for name, file_name in weight_map.items()}


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in the directory itself."""
    return name not in {"", ".", ".."} and not set(name) & {"/", "\\", "\0"}


def read_headers(file: Path, checkpoint: Path) -> dict[str, TensorHeader]:
    """Reads the headers of one file, by the tensors' names."""
    if file.suffix == ".safetensors":
        headers = read_safetensors_header(file, checkpoint)
    else:
        # Importing torch takes seconds, and only pickles need it.
        from compiler_svc.weights.pickle_files import read_pickle_header  # noqa: PLC0415

        headers = read_pickle_header(file, checkpoint)
    return {name: TensorHeader(name, dtype, shape, file) for name, (dtype, shape) in headers.items()}


def read_sharded_headers(checkpoint: Path, index: Path, weight_map: Mapping[str, Path]) -> dict[str, TensorHeader]:
    """Reads the headers of all files that an index names, by the tensors' names.

    A tensor that a file holds and the index does not name belongs to the checkpoint, as it does for transformers.
    """
    headers = {file: read_headers(file, checkpoint) for file in dict.fromkeys(weight_map.values())}
    lacking = [
        FieldViolation(name, f"not in {file.name}", f"a tensor of {file.name}, as {index.name} says")
        for name, file in weight_map.items()
        if name not in headers[file]
    ]
    if lacking:
        raise CheckpointInvalid.listing(checkpoint, lacking)
    held = {name: header for one in headers.values() for name, header in one.items()}
    return held | {name: headers[file][name] for name, file in weight_map.items()}


def read_safetensors_header(file: Path, checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Reads dtype and shape of every tensor in a file, by name."""
    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 the object is no mapping
            return {
                name: (_NAMES.get(part.get_dtype(), part.get_dtype().lower()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        invalid = CheckpointInvalid(checkpoint, file.name, f"a broken file ({error})", "a whole safetensors file")
        raise find_shortage(error) or invalid from error
