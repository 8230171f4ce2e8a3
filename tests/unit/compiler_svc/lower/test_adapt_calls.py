"""Adapters in graphs that call our kernels: which become a part of their layer's call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from compiler_svc.lower.adapt import use_adapt_kernel
from compiler_svc.lower.linear import use_linear_kernel

INPUTS, RANK, SLOTS = 12, 3, 2


def make_weights(*shapes: tuple[int, ...]) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(len(shapes))
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    return nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in drawn)


def make_adapters(*outputs: int, rank: int = RANK) -> nn.ParameterList:
    pairs = (((SLOTS, rank, INPUTS), (SLOTS, count, rank)) for count in outputs)
    return make_weights(*(shape for pair in pairs for shape in pair))


class Layers(nn.Module):
    """Two layers with adapters, one of them fused of three parts and with a bias, and what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = make_weights((20, INPUTS), (20,), (INPUTS, INPUTS))
        self.adapters = make_adapters(8, 7, INPUTS)

    def forward(self, rows: Tensor, adapter_ids: Tensor) -> tuple[Tensor, ...]:
        weight, bias, plain = self.weights
        parts = functional.linear(rows, weight, bias).tensor_split([8, 13], -1)
        hidden = functional.linear(rows, plain) + torch.ops.kiln.adapt(rows, *self.adapters[4:], adapter_ids)
        first = parts[0] + torch.ops.kiln.adapt(rows, *self.adapters[:2], adapter_ids)
        return hidden.sin(), first, parts[1], parts[2] + torch.ops.kiln.adapt(rows, *self.adapters[2:4], adapter_ids)


class Others(nn.Module):
    """Adapters that no call can take in: of rows, of scaled outputs, of outputs that something else reads before."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = make_weights((INPUTS, INPUTS), (5, INPUTS))
        self.adapters = make_adapters(INPUTS, 5)

    def forward(self, rows: Tensor, adapter_ids: Tensor) -> tuple[Tensor, ...]:
        square, narrow = self.weights
        outputs = functional.linear(rows, square)
        read = outputs + torch.ops.kiln.adapt(rows, *self.adapters[:2], adapter_ids)
        scaled = functional.linear(read, narrow) * 2 + torch.ops.kiln.adapt(read, *self.adapters[2:], adapter_ids)
        other = functional.linear(scaled, narrow.t()) + torch.ops.kiln.adapt(rows, *self.adapters[:2], adapter_ids)
        return read + outputs, scaled, other


def use_kernels(model: nn.Module) -> tuple[GraphModule, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the changed graph with its results for four rows, and what they were before."""
    rows = torch.randn(4, 2, INPUTS, generator=torch.Generator().manual_seed(0))
    inputs = (rows, torch.tensor([1, -1, 0, 1], dtype=torch.int32))
    module = torch.export.export(model, inputs).module(check_guards=False)
    use_linear_kernel(module)
    assert use_adapt_kernel(module, {}) == {torch.float32}
    return module, module(*inputs), model(*inputs)


def list_calls(module: GraphModule, name: str) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=getattr(torch.ops.kiln, name).default)


@torch.no_grad()
def test_adapters_of_layers_become_part_of_their_call() -> None:
    module, found, expected = use_kernels(Layers())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    (call,) = list_calls(module, "adapted_linear")
    assert sorted(call.kwargs["firsts"]) == [0, 13, 20]
    assert not list_calls(module, "adapt_live")


@torch.no_grad()
def test_other_adapters_have_calls_of_their_own() -> None:
    module, found, expected = use_kernels(Others())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(list_calls(module, "adapt_live")) == 3
    assert not list_calls(module, "adapted_linear")
