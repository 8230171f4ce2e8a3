"""Rotary position embedding: frequencies as weight tensors, angles in the graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compiler_svc.models.layers.linear import cast
from compiler_svc.models.rope_config import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRope,
    ProportionalRope,
    YarnRope,
)
from compiler_svc.models.sources import RopeSource
from compiler_svc.models.specs import RopeSpec


def compute_frequencies(source: RopeSource) -> Tensor:
    """Inverse frequencies of a rotary embedding, f32 [rotary_dim / 2].

    The arithmetic is transformers', operation by operation, so that the frequencies are equal to the last bit.
    """
    rope, dim = source.rope, source.rotary_dim
    assert not isinstance(rope, NoRope), "models without rotation name no rotary embedding"
    periods = rope.theta ** _exponents(dim)
    inv_freq: Tensor = 1.0 / periods
    match rope:
        case LinearRope():
            return inv_freq / rope.factor
        case YarnRope():
            return _blend_yarn(rope, periods, dim)
        case Llama3Rope():
            return _blend_llama3(rope, inv_freq)
        case LongRope():
            factors = rope.long_factor if source.is_long else rope.short_factor
            return 1.0 / (torch.tensor(factors) * periods)
        case ProportionalRope():
            num_rotated = int(rope.proportion * dim // 2)
            return torch.cat((inv_freq[:num_rotated], torch.zeros(dim // 2 - num_rotated))) / rope.factor
    return inv_freq


class RotaryEmbedding(nn.Module):
    """Turns positions into cosines and sines."""

    inv_freq: nn.Parameter
    long_inv_freq: nn.Parameter

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.rope = spec.rope
        self.rotary_dim = spec.rotary_dim
        self.is_wide = spec.is_wide
        for parameter in spec.parameters():
            values = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32), requires_grad=False)
            self.register_parameter(parameter.name.rpartition(".")[2], values)

    def forward(self, position_ids: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Computes cosines and sines [rows, tokens, rotary_dim] in `dtype`, or in float32 if heads are rotated in it.

        Args:
            position_ids: int32 [rows, tokens].
            lengths: int32 [rows, tokens], or [rows, 1]: tokens of the sequence with which each is computed; see
                `StepTokens.lengths`. Kinds whose frequencies depend on the length take each row's own, as if it were
                alone in the batch.
        """
        angles = position_ids[..., None].float() * self._frequencies(lengths)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if isinstance(self.rope, YarnRope | LongRope):
            cos, sin = cos * self.rope.attention_scaling, sin * self.rope.attention_scaling
        return (cos, sin) if self.is_wide else (cast(cos, dtype), cast(sin, dtype))

    def _frequencies(self, lengths: Tensor) -> Tensor:
        """f32 [rotary_dim / 2], or [rows, tokens or 1, rotary_dim / 2] if they depend on the length."""
        lengths = lengths[..., None]
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
        theta = rope.theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2))
        return 1.0 / theta ** _exponents(self.rotary_dim, lengths.device)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dimensions of each head: of the first `rotary_dim` ones the first half against the second.

    Heads are [rows, tokens, heads, head_dim], cosines and sines [rows, tokens, rotary_dim].
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        rotated = rotate(heads[..., :rotary_dim], cos, sin)
        return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return cast(heads * cos.unsqueeze(2) + swapped * sin.unsqueeze(2), heads.dtype)


def _exponents(dim: int, device: torch.device | None = None) -> Tensor:
    """f32 [dim / 2]: 0, 2 / dim, 4 / dim, …"""
    return torch.arange(0, dim, 2, dtype=torch.int32, device=device).float() / dim


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
