"""Products in float32 that stand for those in two bytes an item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from compiler_svc.golden.reference import MIN_ROWS, WideProducts, list_slow_dtypes

NARROW = (torch.bfloat16, torch.float16)
#: One less than the many rows.
FEW = MIN_ROWS - 1


class Noting(TorchFunctionMode):
    """Notes the dtype of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in {functional.linear, torch.matmul, torch.Tensor.matmul, torch.addmm}:
            self.dtypes.append(args[-1].dtype if args[-1] is not None else args[0].dtype)
        return func(*args, **(kwargs or {}))


PRODUCTS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": functional.linear,
    "linear without bias": lambda rows, matrix, bias: functional.linear(rows, matrix, None),
    "matmul": lambda rows, matrix, bias: torch.matmul(rows, matrix.T),
    "@": lambda rows, matrix, bias: rows @ matrix.T,
    "addmm": lambda rows, matrix, bias: torch.addmm(bias, rows, matrix.T),
}


def multiply(product: str, dtype: torch.dtype, num_rows: int, mode: WideProducts) -> tuple[Tensor, Tensor, Noting]:
    """A product in the mode, and the same in float64."""
    made = torch.Generator().manual_seed(0)
    shapes = ((num_rows, 64), (48, 64), (48,))
    rows, matrix, bias = (torch.randn(shape, generator=made).to(dtype) for shape in shapes)
    with Noting() as noting, mode:
        rounded = PRODUCTS[product](rows, matrix, bias)
    return rounded, PRODUCTS[product](rows.double(), matrix.double(), bias.double()), noting


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("product", PRODUCTS)
def test_many_rows_are_multiplied_in_float32_and_rounded_once(product: str, dtype: torch.dtype) -> None:
    rounded, exact, noting = multiply(product, dtype, MIN_ROWS, WideProducts({dtype}))
    assert noting.dtypes == [torch.float32]
    assert rounded.dtype == dtype
    # Half of the distance of two neighbours at most, and what float32 sums lose.
    torch.testing.assert_close(rounded.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize(("num_rows", "dtypes"), [(FEW, {torch.bfloat16}), (MIN_ROWS, {torch.float16})])
def test_few_rows_and_other_dtypes_stay_as_they_are(num_rows: int, dtypes: set[torch.dtype]) -> None:
    given, _, noting = multiply("linear", torch.bfloat16, num_rows, WideProducts(dtypes))
    assert (given.dtype, noting.dtypes) == (torch.bfloat16, [torch.bfloat16])


def test_slow_dtypes_are_of_two_bytes() -> None:
    assert list_slow_dtypes() <= set(NARROW)
