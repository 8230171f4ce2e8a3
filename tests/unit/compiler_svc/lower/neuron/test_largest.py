"""Rows that are wider than neuronx-cc takes are divided; the result is that of whole rows."""

from __future__ import annotations

import pytest
import torch

from compiler_svc.lower.neuron.largest import make_operators


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
