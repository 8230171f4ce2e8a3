"""The normalization layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiler_svc.models.layers.linear import cast, make_parameter
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.specs import LayerNormSpec, NormSpec, RmsNormSpec


class RmsNorm(nn.Module):
    """Root mean square normalization over the last axis, in float32; over the parts of all ranks if they divide it."""

    def __init__(self, spec: RmsNormSpec, ranks: Ranks) -> None:
        super().__init__()
        (scale,) = spec.parameters()
        self.eps, self.offset, self.rounds_last = spec.eps, spec.offset, spec.rounds_last
        self.weight = make_parameter(scale, ranks)
        self.ranks = ranks
        is_summed = spec.axis.is_divided and ranks.tp_degree > 1
        # Ranks may hold copies of the same heads, and each copy adds to the sum. Padding is zeros.
        self._num_summed = spec.axis.length * spec.axis.count_copies(ranks.tp_degree) if is_summed else 0

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, items] to the same shape and dtype; of a divided axis the rank's part."""
        wide = cast(hidden, torch.float32)
        normed = wide * torch.rsqrt(self._mean_square(wide) + self.eps)
        dtype = torch.float32 if self.rounds_last else hidden.dtype
        scale = cast(self.weight, dtype)
        if self.offset:
            scale = scale + self.offset
        return cast(scale * cast(normed, dtype), hidden.dtype)

    def _mean_square(self, wide: Tensor) -> Tensor:
        if not self._num_summed:
            return wide.square().mean(-1, keepdim=True)
        return self.ranks.sum_exactly(wide.square().sum(-1, keepdim=True)) / self._num_summed


class LayerNorm(nn.Module):
    """Layer normalization over the last axis, in float32: mean 0 and variance 1, then maybe scales and biases.

    If each head has scales of its own, the axis before the last one holds the rank's heads.
    """

    def __init__(self, spec: LayerNormSpec, ranks: Ranks) -> None:
        super().__init__()
        assert not spec.axis.is_divided, f"{spec.name}: ranks normalize whole axes"
        self.eps = spec.eps
        parameters = {one.name.rpartition(".")[2]: make_parameter(one, ranks) for one in spec.parameters()}
        self.weight, self.bias = parameters.get("weight"), parameters.get("bias")

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, items] to the same shape and dtype."""
        wide = cast(hidden, torch.float32)
        centered = wide - wide.mean(-1, keepdim=True)
        normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            normed = normed * cast(self.weight, torch.float32)
        if self.bias is not None:
            normed = normed + cast(self.bias, torch.float32)
        return cast(normed, hidden.dtype)


def make_norm(spec: NormSpec | None, ranks: Ranks) -> nn.Module:
    """Makes the module of a norm, or one that changes nothing if there is no norm."""
    if spec is None:
        return nn.Identity()
    return RmsNorm(spec, ranks) if isinstance(spec, RmsNormSpec) else LayerNorm(spec, ranks)
