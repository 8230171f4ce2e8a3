"""The check of graphs sees what torch-xla traces, not only modules that tests write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_xla

from compiler_svc.lower.neuron.hlo_check import check_hlo
from compiler_svc.lower.xla import REFUSED, OperatorRefused, register_operators
from tests.device.xla.graphs import check_graph, read_graph

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: A call of each operator that is right only in functionalized graphs, of ones [2, 4].
REFUSED_CALLS = {
    "split_with_sizes": lambda ones: ones.cumsum(-1).split([1, 3], -1)[1].contiguous(),
    "view.dtype": lambda ones: ones.view(torch.int32),
    "diag_embed": torch.diag_embed,
    "block_diag": lambda ones: torch.block_diag(ones, ones),
    "narrow_copy": lambda ones: torch.narrow_copy(ones, 1, 1, 2),
}


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


def test_every_refused_operator_is_called() -> None:
    assert REFUSED_CALLS.keys() == REFUSED.keys()


@pytest.mark.parametrize("operator", REFUSED_CALLS)
def test_an_operator_that_is_right_only_in_functionalized_graphs(operator: str) -> None:
    ones = torch.ones(2, 4, device=torch_xla.device())
    with register_operators(), pytest.raises(OperatorRefused, match=f"aten::{operator} is right only"):
        REFUSED_CALLS[operator](ones)


@pytest.mark.parametrize("operator", REFUSED_CALLS)
def test_what_is_refused_is_wrong_or_fails(operator: str) -> None:
    """An operator that a later torch-xla has right need not be refused."""
    call, ones = REFUSED_CALLS[operator], torch.ones(2, 4)
    try:
        computed = call(ones.to(torch_xla.device())).cpu()
    except (RuntimeError, NotImplementedError):
        return
    assert not torch.equal(computed, call(ones))
