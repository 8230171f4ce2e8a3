"""The check of graphs sees what torch-xla traces, not only modules that tests write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_xla

from compiler_svc.lower.neuron.hlo_check import check_hlo
from tests.device.xla.graphs import check_graph, read_graph

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def take_one(values: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return values * 2


@pytest.mark.parametrize(
    ("code", "compute"),
    [
        ("NCC_ESPP004", lambda values, places: values.double() + places),
        ("NCC_EVRF013", lambda values, places: (values.int() + places).sort().values),
        ("NCC_EVRF035", lambda values, places: values.int().outer(places) @ places),
        ("NCC_EVRF016", lambda values, places: (values.int() * 2).index_add(0, places, places)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_graph_that_breaks_a_rule(code: str, compute: Compute) -> None:
    graph = read_graph(*make_results(compute))
    assert graph.unread == []
    assert code in {one.code for one in check_hlo(graph.module, target="trn2", memory_bytes=None)}
    with pytest.raises(AssertionError, match=code):
        check_graph(graph, ())


def test_a_graph_that_keeps_them() -> None:
    check_graph(read_graph(*make_results(torch.add)), ())


def test_an_input_that_a_graph_does_not_read() -> None:
    graph = read_graph(*make_results(take_one))
    assert graph.unread == ["places"]
    with pytest.raises(AssertionError, match="places"):
        check_graph(graph, ())


def make_results(compute: Compute) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What a function makes of three numbers and three places, and these two."""
    taken = {"values": torch.tensor([0.5, 2.0, 1.0]), "places": torch.tensor([2, 0, 1], dtype=torch.int32)}
    on_device = {name: tensor.to(torch_xla.device()) for name, tensor in taken.items()}
    return [compute(*on_device.values())], on_device
