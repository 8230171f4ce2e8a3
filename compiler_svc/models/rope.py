"""Rotary position embedding: frequencies as weight tensors, angles in the graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compiler_svc.models.layers import cast
from compiler_svc.models.llama_tensors import ROPE_INV_FREQ, ROPE_LONG_INV_FREQ
from compiler_svc.models.rope_config import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeConfig,
    YarnRope,
)


def compute_rope_tensors(rope: RopeConfig, head_dim: int) -> dict[str, Tensor]:
    """Inverse frequencies, f32 [head_dim / 2], by the names that shards give them.

    The arithmetic is transformers', operation by operation, so that the frequencies are equal to the last bit.
    """
    periods = rope.theta ** _exponents(head_dim)
    inv_freq = 1.0 / periods
    match rope:
        case LinearRope():
            inv_freq = inv_freq / rope.factor
        case YarnRope():
            inv_freq = _blend_yarn(rope, periods, head_dim)
        case Llama3Rope():
            inv_freq = _blend_llama3(rope, inv_freq)
        case LongRope():
            return {
                ROPE_INV_FREQ: 1.0 / (torch.tensor(rope.short_factor) * periods),
                ROPE_LONG_INV_FREQ: 1.0 / (torch.tensor(rope.long_factor) * periods),
            }
    return {ROPE_INV_FREQ: inv_freq}


class RotaryEmbedding(nn.Module):
    """Turns positions into cosines and sines."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        self.inv_freq = nn.Parameter(torch.empty(head_dim // 2, dtype=torch.float32), requires_grad=False)
        if isinstance(rope, LongRope):
            self.long_inv_freq = nn.Parameter(torch.empty(head_dim // 2, dtype=torch.float32), requires_grad=False)

    def forward(self, position_ids: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Computes the rotation of every token.

        Args:
            position_ids: int32 [rows, tokens].
            lengths: int32 [rows]: tokens of each row's sequence so far, with those of this step. Kinds whose
                frequencies depend on the length take each row's own, as if it were alone in the batch.

        Returns:
            Cosines and sines, `dtype` [rows, tokens, head_dim].
        """
        angles = position_ids[..., None].float() * self._frequencies(lengths)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if isinstance(self.rope, YarnRope | LongRope):
            cos, sin = cos * self.rope.attention_scaling, sin * self.rope.attention_scaling
        return cast(cos, dtype), cast(sin, dtype)

    def _frequencies(self, lengths: Tensor) -> Tensor:
        """f32 [head_dim / 2], or [rows, 1, head_dim / 2] where they depend on the length."""
        lengths = lengths[:, None, None]
        if isinstance(self.rope, LongRope):
            is_long = lengths > self.rope.original_max_position_embeddings
            return torch.where(is_long, self.long_inv_freq, self.inv_freq)
        if isinstance(self.rope, DynamicRope):
            is_long = lengths > self.rope.max_position_embeddings
            return torch.where(is_long, self._stretched_frequencies(self.rope, lengths), self.inv_freq)
        return self.inv_freq

    def _stretched_frequencies(self, rope: DynamicRope, lengths: Tensor) -> Tensor:
        # Short rows take `inv_freq`; for them the stretch could be the root of a negative number.
        lengths = lengths.clamp(min=rope.max_position_embeddings)
        stretch = rope.factor * lengths / rope.max_position_embeddings - (rope.factor - 1)
        theta = rope.theta * stretch ** (self.head_dim / (self.head_dim - 2))
        return 1.0 / theta ** _exponents(self.head_dim)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first half of each head's dimensions against the second.

    Args:
        heads: [rows, tokens, heads, head_dim].
        cos: [rows, tokens, head_dim]; `sin` as well.
    """
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return heads * cos.unsqueeze(2) + swapped * sin.unsqueeze(2)


def _exponents(head_dim: int) -> Tensor:
    """f32 [head_dim / 2]: 0, 2 / head_dim, 4 / head_dim, …"""
    return torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim


def _blend_yarn(rope: YarnRope, periods: Tensor, head_dim: int) -> Tensor:
    low, high = (_yarn_dimension(rope, turns, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _yarn_dimension(rope: YarnRope, turns: float, head_dim: int) -> float:
    """The dimension that turns this often within the original length."""
    return (
        head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
    )


def _blend_llama3(rope: Llama3Rope, inv_freq: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / inv_freq
    is_low = wavelengths > original / rope.low_freq_factor
    is_high = wavelengths < original / rope.high_freq_factor
    scaled = torch.where(is_low, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~is_high & ~is_low, blended, scaled)
