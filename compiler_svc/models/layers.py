"""Rank-local layers. Parameters are uninitialized: values come from a weight shard.

A parameter may have another dtype than the activations (`cast_type` as-declared); it is cast where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from compiler_svc.models.collectives import all_gather, all_reduce

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}


class ColumnParallelLinear(nn.Module):
    """A matrix whose outputs are divided among ranks."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, tp_degree: int) -> None:
        super().__init__()
        self.weight = _parameter(out_features // tp_degree, in_features)
        self.bias = _parameter(out_features // tp_degree) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, in_features] to the rank's part of [..., out_features]."""
        bias = None if self.bias is None else cast(self.bias, hidden.dtype)
        return functional.linear(hidden, cast(self.weight, hidden.dtype), bias)


class RowParallelLinear(nn.Module):
    """A matrix whose inputs are divided among ranks; outputs are summed over them."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, tp_degree: int) -> None:
        super().__init__()
        self.tp_degree = tp_degree
        self.weight = _parameter(out_features, in_features // tp_degree)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """The rank's part of [..., in_features] to [..., out_features]."""
        weight = cast(self.weight, hidden.dtype)
        bias = None if self.bias is None else cast(self.bias, hidden.dtype)
        if self.tp_degree == 1:
            return functional.linear(hidden, weight, bias)
        total = all_reduce(functional.linear(hidden, weight), self.tp_degree)
        return total if bias is None else total + bias


class Embedding(nn.Module):
    """Token embeddings, divided among ranks along the hidden axis."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tp_degree: int) -> None:
        super().__init__()
        self.tp_degree = tp_degree
        self.weight = _parameter(vocab_size, hidden_size // tp_degree)

    def forward(self, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """int32 [...] to [..., hidden_size]."""
        return all_gather(cast(functional.embedding(input_ids, self.weight), dtype), self.tp_degree)


class RmsNorm(nn.Module):
    """Root mean square normalization, in float32."""

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] to the same shape and dtype."""
        wide = cast(hidden, torch.float32)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return cast(self.weight, hidden.dtype) * cast(scaled, hidden.dtype)


class GatedMlp(nn.Module):
    """Feed-forward layer with a gate: `down(act(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, act: str, bias: bool, tp_degree: int) -> None:
        super().__init__()
        self.act = ACTIVATIONS[act]
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias=bias, tp_degree=tp_degree)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias=bias, tp_degree=tp_degree)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, tp_degree=tp_degree)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] to the same shape."""
        activated: Tensor = self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))
        return activated


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; one that has it already adds no operation to the graph."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
