"""Headers of safetensors files. The safetensors library checks them; nothing of a tensor is read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from compiler_svc.weights.errors import CheckpointInvalid

#: torch's names of the dtypes that a checkpoint may hold; others keep the file's name in lower case.
DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


def read_safetensors_header(file: Path, checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a file, by name.

    Raises:
        CheckpointInvalid: The file is truncated or no safetensors file.
    """
    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 the object is no mapping
            return {
                name: (DTYPES.get(part.get_dtype(), part.get_dtype().lower()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointInvalid(
            checkpoint, file.name, f"a broken file ({error})", "a whole safetensors file"
        ) from error
