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

from compiler_svc.models.collectives import Ranks

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

    def __init__(self, in_features: int, rank_outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(rank_outputs, in_features)
        self.bias = _parameter(rank_outputs) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, in_features] to the rank's part, [..., rank_outputs]."""
        bias = None if self.bias is None else cast(self.bias, hidden.dtype)
        return functional.linear(hidden, cast(self.weight, hidden.dtype), bias)


class RowParallelLinear(nn.Module):
    """A matrix whose inputs are divided among ranks; outputs are summed over them."""

    def __init__(self, rank_inputs: int, out_features: int, *, bias: bool, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = _parameter(out_features, rank_inputs)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """The rank's part, [..., rank_inputs], to [..., out_features]."""
        weight = cast(self.weight, hidden.dtype)
        bias = None if self.bias is None else cast(self.bias, hidden.dtype)
        if self.ranks.tp_degree == 1:
            return functional.linear(hidden, weight, bias)
        # Every rank holds the whole bias: it is added once, to the sum.
        total = self.ranks.all_reduce(functional.linear(hidden, weight))
        return total if bias is None else total + bias


class Embedding(nn.Module):
    """Token embeddings, divided among ranks along the hidden axis."""

    def __init__(self, vocab_size: int, hidden_size: int, *, ranks: Ranks) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ranks = ranks
        self.weight = _parameter(vocab_size, ranks.share(hidden_size))

    def forward(self, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """int32 [...] to [..., hidden_size]."""
        whole = self.ranks.all_gather(cast(functional.embedding(input_ids, self.weight), dtype))
        return whole if whole.shape[-1] == self.hidden_size else whole[..., : self.hidden_size]


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

    def __init__(self, hidden_size: int, intermediate_size: int, *, act: str, bias: bool, ranks: Ranks) -> None:
        super().__init__()
        self.act = ACTIVATIONS[act]
        share = ranks.share(intermediate_size)
        self.gate_proj = ColumnParallelLinear(hidden_size, share, bias=bias)
        self.up_proj = ColumnParallelLinear(hidden_size, share, bias=bias)
        self.down_proj = RowParallelLinear(share, hidden_size, bias=bias, ranks=ranks)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] to the same shape."""
        activated: Tensor = self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))
        return activated


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; one that has it already adds no operation to the graph."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
