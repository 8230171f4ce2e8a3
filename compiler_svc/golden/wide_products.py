"""Products of matrices in two bytes an item, on processors for which torch has slow ones alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: Rows from which a product takes longer than copies of its matrices in float32. On AVX2, 504 rows in bfloat16 took
#: five times as long without them.
MIN_ROWS: Final = 32

#: What multiplies matrices, each with the place of the rows among its arguments.
_PRODUCTS: Final[Mapping[Any, int]] = {functional.linear: 0, torch.matmul: 0, torch.Tensor.matmul: 0, torch.addmm: 1}


def list_slow_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that torch's library of products does not have for this host's processor."""
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001 - no other function says so
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # noqa: SLF001
    }
    return frozenset(dtype for dtype, is_there in has.items() if not is_there)


class WideProducts(TorchFunctionMode):
    """Multiplies many rows by float32 copies of the matrices, and rounds the sums, as torch does item by item."""

    def __init__(self, dtypes: Collection[torch.dtype]) -> None:
        """Leaves products in other dtypes as they are."""
        super().__init__()
        self._dtypes = dtypes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each of its functions while the mode is on."""
        place = _PRODUCTS.get(func)
        if place is None or kwargs or args[place].dtype not in self._dtypes:
            return func(*args, **(kwargs or {}))
        rows = args[place]
        if rows.shape[:-1].numel() < MIN_ROWS:
            return func(*args)
        return func(*(None if one is None else one.float() for one in args)).to(rows.dtype)
