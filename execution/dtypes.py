"""The manifest's dtype names as torch dtypes."""

from __future__ import annotations

from typing import Final

import torch

from bundle.abi.tensor import DType

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
}


def dtype_name(dtype: torch.dtype | None) -> str:
    """The manifest's name of a torch dtype, such as `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
