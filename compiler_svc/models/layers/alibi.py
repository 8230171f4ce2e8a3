"""ALiBi: scores that fall with distance, by a slope for each query head (Press et al., arXiv:2108.12409)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiler_svc.models.sources import SlopeSource


def compute_slopes(source: SlopeSource) -> Tensor:
    """Slopes of all query heads, f32 [num_heads], as transformers computes them.

    If the number of heads is a power of two, n, they are a geometric sequence that begins with its ratio,
    `2 ** (-8 / n)`. Otherwise heads beyond the next lower power of two take every other slope of twice as many heads.
    """
    count = 1 << (source.num_heads.bit_length() - 1)
    others = range(1, 2 * (source.num_heads - count), 2)
    return torch.cat((_compute_powers(count, range(1, count + 1)), _compute_powers(2 * count, others)))


def _compute_powers(count: int, exponents: range) -> Tensor:
    """Powers of the ratio of as many heads."""
    ratio = torch.tensor(2.0 ** -(2.0 ** -(math.log2(count) - 3)), dtype=torch.float32)
    return ratio ** torch.tensor(exponents, dtype=torch.int32)
