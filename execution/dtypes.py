"""The manifest's dtype names as torch dtypes."""

from __future__ import annotations

from typing import Final

import torch

from bundle.abi.tensor import DTYPES, DType

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {name: getattr(torch, name) for name in DTYPES}


def dtype_name(dtype: torch.dtype | None) -> str:
    """The manifest's name of a torch dtype, such as `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
