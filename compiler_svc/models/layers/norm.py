"""The normalization layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiler_svc.models.description import NormSpec
from compiler_svc.models.layers.linear import cast, make_parameter
from compiler_svc.models.layers.ranks import Ranks


class RmsNorm(nn.Module):
    """Root mean square normalization over the last axis, in float32."""

    def __init__(self, spec: NormSpec, ranks: Ranks) -> None:
        super().__init__()
        (scale,) = spec.parameters()
        self.eps = spec.eps
        self.weight = make_parameter(scale, ranks)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, items] to the same shape and dtype."""
        wide = cast(hidden, torch.float32)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return cast(self.weight, hidden.dtype) * cast(scaled, hidden.dtype)
