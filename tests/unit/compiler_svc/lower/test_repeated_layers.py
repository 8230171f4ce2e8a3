"""Graphs whose layers became calls: they compute what they computed, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from compiler_svc.lower.repeated_layers import CALL_LAYER, outline_layers

WIDTH, ROWS, SLOTS = 8, 2, 5


class Layer(nn.Module):
    """Writes its input into a cache, and adds what it reads of the cache's first `window` rows, times `scale`."""

    def __init__(self, window: int = 2, width: int = WIDTH, scale: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.window, self.scale = window, scale

    def forward(self, hidden: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        normed = hidden * hidden.pow(2).mean(-1, keepdim=True).rsqrt()
        new = cache.index_put((slots,), normed)
        attended = normed + new[: self.window].mean(0) * self.scale
        return hidden + self.down(torch.relu(self.up(attended))), new


class ViewLayer(Layer):
    """Returns the memory that it was given."""

    def forward(self, hidden: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return hidden[:, :], cache.index_put((slots,), self.down(torch.relu(self.up(hidden))))


class StaleLayer(Layer):
    """Reads its cache as it was before."""

    def forward(self, hidden: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        new = cache.index_put((slots,), self.up(hidden))
        return hidden + self.down(new[:ROWS] + cache[:ROWS]), new


class Model(nn.Module):
    """Updates the caches in place, behind all layers."""

    def __init__(self, layers: Sequence[nn.Module], *, skips: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 3)
        self.skips = skips

    def forward(self, x: Tensor, slots: Tensor, *caches: Tensor) -> Tensor:
        hidden = self.first(x)
        rows, skipped, new_caches = slots % SLOTS, torch.zeros_like(hidden), []
        for layer, cache in zip(self.layers, caches, strict=True):
            if self.skips:
                skipped = skipped + hidden.sin()
            hidden, new = layer(hidden, rows, cache)
            new_caches.append(new)
        for cache, new in zip(caches, new_caches, strict=True):
            cache.copy_(new)
        result: Tensor = self.head(hidden + skipped)
        return result


def export(model: Model) -> GraphModule:
    with torch.no_grad():
        return torch.export.export(model, make_arguments(model)).module(check_guards=False)


def make_arguments(model: Model) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    caches = [torch.randn(SLOTS, WIDTH) for _ in model.layers]
    return (torch.randn(ROWS, WIDTH), torch.tensor([SLOTS + 3, 1]), *caches)


def count_calls(module: GraphModule) -> list[str]:
    return [str(node.args[0]) for node in module.graph.find_nodes(op="call_function", target=CALL_LAYER)]


def check_same_results(model: Model, module: GraphModule) -> None:
    """Compares results and caches after two steps."""
    expected, got = make_arguments(model), make_arguments(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(*expected), module(*got))
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_layers", [2, 5])
def test_equal_layers_become_calls_of_one(num_layers: int) -> None:
    model = Model([Layer() for _ in range(num_layers)])
    module = export(model)
    num_nodes = len(module.graph.nodes)
    ((name, layer),) = outline_layers(module).items()
    assert count_calls(module) == [name] * num_layers
    assert not list(layer.named_parameters())
    inside = len(layer.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default))
    assert (inside, len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default))) == (2, 2)
    assert len(module.graph.nodes) < num_nodes
    check_same_results(model, module)


def test_the_update_of_a_cache_moves_into_its_layer() -> None:
    model = Model([Layer(), Layer()])
    module = export(model)
    (layer,) = outline_layers(module).values()
    copy = torch.ops.aten.copy_.default
    assert len(layer.graph.find_nodes(op="call_function", target=copy)) == 1
    assert not module.graph.find_nodes(op="call_function", target=copy)


@pytest.mark.parametrize("kinds", [({"window": 1}, {"window": 2}), ({"scale": 1.0}, {"scale": 2.0})])
def test_layers_that_alternate_are_two(kinds: Sequence[dict[str, Any]]) -> None:
    model = Model([Layer(**kinds[index % 2]) for index in range(5)])
    module = export(model)
    layers = outline_layers(module)
    assert len(layers) == 2
    calls = count_calls(module)
    assert calls == [calls[0], calls[1]] * 2 + [calls[0]]
    check_same_results(model, module)


@pytest.mark.parametrize("odd", [0, 2, 3])
def test_a_layer_like_no_other_stays(odd: int) -> None:
    model = Model([Layer(width=16 if index == odd else WIDTH) for index in range(4)])
    module = export(model)
    assert len(outline_layers(module)) == 1
    assert len(count_calls(module)) == 3
    check_same_results(model, module)


@pytest.mark.parametrize(
    "model",
    [
        Model([Layer(), Layer(), Layer()], skips=True),
        Model([ViewLayer(), ViewLayer()]),
        Model([Layer(width=width) for width in (4, 8, 16)]),
        Model([Layer()]),
    ],
    ids=["skipping", "viewing", "different", "single"],
)
def test_other_graphs_stay_as_they_are(model: Model) -> None:
    module = export(model)
    assert outline_layers(module) == {}
    assert count_calls(module) == []
    check_same_results(model, module)


def test_a_cache_is_not_updated_before_its_last_reader() -> None:
    model = Model([StaleLayer(), StaleLayer()])
    module = export(model)
    outline_layers(module)
    check_same_results(model, module)


def test_equal_layers_have_equal_names_whatever_their_weights_are_called() -> None:
    class Other(Model):
        def __init__(self) -> None:
            super().__init__([])
            self.blocks = nn.ModuleList([Layer(), Layer()])
            self.layers = self.blocks

    names = [list(outline_layers(export(model))) for model in (Model([Layer(), Layer()]), Other())]
    assert names[0] == names[1]
    assert names != [list(outline_layers(export(Model([Layer(width=4), Layer(width=4)]))))] * 2
