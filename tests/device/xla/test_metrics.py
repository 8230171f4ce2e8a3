"""The other tests rely on what torch-xla counts."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics

from tests.device.xla.traces import count_graphs, list_fallbacks


def test_what_xla_does_not_lower_is_counted() -> None:
    torch.ones(3, 3, device=torch_xla.device()).det().cpu()
    assert list_fallbacks() == ["aten::_linalg_det"]
    torch_xla.debug.metrics.clear_all()


@pytest.mark.parametrize("num_graphs", [0, 1, 2])
def test_graphs_are_counted(num_graphs: int) -> None:
    value, before = torch.ones(3, device=torch_xla.device()), count_graphs()
    for number in range(num_graphs):
        (value + number).cpu()
    assert count_graphs() - before == num_graphs
