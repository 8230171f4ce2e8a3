"""Operators of a compiler take the place of those that graphs have otherwise, until the block ends."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch_xla

from compiler_svc.lower.neuron.largest import make_operators
from compiler_svc.lower.neuron.model_builder import OPERATORS
from compiler_svc.lower.xla import register_operators
from execution.candidates import find_likeliest, take_top
from tests.device.xla.graphs import check_graph, find_call, read_graph
from tests.device.xla.traces import one_graph


def take_last_of_equals(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    backwards = values.flip(-1).sort(dim=-1, descending=True, stable=True)
    return backwards.values[:, :count], (values.shape[-1] - 1 - backwards.indices[:, :count]).to(torch.int32)


def test_own_operators() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0, 1.0]])
    on_device = logits.to(torch_xla.device())
    calls: list[object] = []

    def take(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(count)
        return take_last_of_equals(values, count)

    def find(values: torch.Tensor) -> torch.Tensor:
        calls.append("argmax")
        return take_last_of_equals(values, 1)[1][:, 0]

    with register_operators(topk=take, argmax=find):
        assert find_likeliest(on_device).cpu().tolist() == [1]
        with one_graph():
            top, ids = take_top(on_device, 4)
            torch_xla.sync(wait=True)
    assert calls == ["argmax", 4, 4]
    assert (top.tolist(), ids.tolist()) == ([[3.0, 3.0, 3.0, 1.0]], [[1, 2, 4, 0]])
    assert find_likeliest(on_device).cpu().tolist() == [1]
    assert calls == ["argmax", 4, 4]


@pytest.mark.parametrize(
    ("num_columns", "widths"),
    [(9, [9]), (16_384, [16_384]), (16_385, [16_384, 1, 9]), (40_000, [16_384, 16_384, 7_232, 24])],
)
def test_neurons_operators(num_columns: int, widths: list[int]) -> None:
    """Rows are no wider than neuronx-cc takes, and nothing is sorted."""
    logits = torch.randn(2, num_columns).to(torch_xla.device())
    with register_operators(**OPERATORS["single"]):
        graph = read_graph([*take_top(logits, 8), find_likeliest(logits)], {"logits": logits})
    check_graph(graph, ())
    calls = [one for one in graph.instructions if one.op == "custom-call"]
    taken = [int(re.search(r"custom-call\(f32\[2,(\d+)\]", one.text)[1]) for one in calls]
    # Candidates are taken twice.
    assert sorted(taken) == sorted([*widths * 2, num_columns])
    assert Counter(map(find_call, calls)) == {"AwsNeuronTopK": 2 * len(widths), "AwsNeuronArgMax": 1}


def test_recorded_calls() -> None:
    """Graphs that ask for no more than is on record are right, and break no rule."""
    logits = torch.randn(2, 20_000).to(torch_xla.device())
    with register_operators(**OPERATORS["recorded"]):
        graph = read_graph([*take_top(logits, 100)], {"logits": logits})
    check_graph(graph, ())
    calls = [one.text for one in graph.instructions if one.op == "custom-call"]
    counts = [int(re.search(r"f32\[2,(\d+)\]", one)[1]) for one in calls]
    # Four rounds of two parts and their join, twice.
    assert Counter(counts) == {32: 18, 4: 6}
    operators = make_operators(lambda values: values.argmax(-1), lambda values, count: tuple(values.topk(count)), 32)
    with register_operators(**operators), one_graph():
        top, ids = take_top(logits, 100)
        torch_xla.sync(wait=True)
    wanted = take_top(logits.cpu(), 100)
    assert torch.equal(top.cpu(), wanted[0])
    assert torch.equal(ids.cpu(), wanted[1])
