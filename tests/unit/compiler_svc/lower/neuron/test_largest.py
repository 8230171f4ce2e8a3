"""Rows that are wider than neuronx-cc takes are divided; the result is that of whole rows."""

from __future__ import annotations

import pytest
import torch

from compiler_svc.lower.neuron.largest import make_operators
from targets.neuron import RECORDED_TOP_K, TOP_K_WAYS


@pytest.mark.parametrize(
    ("num_columns", "widths"), [(9, [9]), (16_385, [16_384, 1, 10]), (40_000, [16_384, 16_384, 7_232, 27])]
)
def test_parts_of_wide_rows(num_columns: int, widths: list[int]) -> None:
    taken = []

    def take(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(values.shape[-1])
        return tuple(values.topk(count))

    operators = make_operators(lambda values: values.argmax(-1), take)
    values = torch.randn(3, num_columns, generator=torch.Generator().manual_seed(0))
    largest, places = operators["topk"](values, 9)
    wanted = values.topk(9)
    assert taken == widths
    assert torch.equal(largest, wanted.values)
    assert torch.equal(places, wanted.indices.to(torch.int32))
    assert places.dtype == operators["argmax"](values).dtype == torch.int32
    assert torch.equal(operators["argmax"](values), values.argmax(-1).to(torch.int32))


@pytest.mark.parametrize(("num_columns", "count"), [(64, 64), (300, 100), (20_000, 256), (20_000, 32)])
def test_recorded_calls_alone_take_any_number(num_columns: int, count: int) -> None:
    """Minus infinity has places of its own, too: no place is taken twice."""
    taken = []

    def take(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append((values.shape[-1], count))
        return tuple(values.topk(count))

    operators = make_operators(lambda values: values.argmax(-1), take, TOP_K_WAYS["recorded"])
    values = torch.randn(3, num_columns, generator=torch.Generator().manual_seed(0))
    values[1, 10:] = -torch.inf
    largest, places = operators["topk"](values, count)
    assert torch.equal(largest, values.topk(count).values)
    assert torch.equal(values.gather(1, places.long()), largest)
    assert all(len(set(row)) == count for row in places.tolist())
    assert places.dtype == torch.int32
    (columns, candidates), *_ = RECORDED_TOP_K
    assert all(width <= columns and most <= candidates for width, most in taken)
