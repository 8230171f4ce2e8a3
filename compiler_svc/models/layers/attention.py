"""Grouped-query attention over a functional KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

import execution.attention.operators  # noqa: F401 - registers torch.ops.kiln.attend
from compiler_svc.models.layers.linear import Adaptable, Linear, SharedInput, cast, make_parameter
from compiler_svc.models.layers.norm import make_norm
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.rope import rotate
from compiler_svc.models.layers.step import StepTokens
from compiler_svc.models.sources import SlopeSource
from compiler_svc.models.specs import AttentionSpec
from execution.dtypes import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of one layer: [blocks, kv_heads, positions of a block, head_dim] each.

    A slot is a block that has room for a whole sequence. No token lies at the last place of the last block.
    """

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Projections, rotation, cache and attention of one layer."""

    def __init__(self, spec: AttentionSpec, ranks: Ranks) -> None:
        super().__init__()
        layout = spec.heads.layout(ranks.tp_degree)
        self.head_dim = spec.heads.head_dim
        self.num_heads, self.num_kv_heads = layout.num_query_heads, layout.num_kv_heads
        self.window = spec.state.window or 0
        self.scale = self.head_dim**-0.5 if spec.scale is None else spec.scale
        self.soft_cap = spec.soft_cap
        self._projections = tuple(projection.module for projection in spec.projections)
        for projection in spec.projections:
            self.add_module(projection.module, Linear(projection, ranks))
        parts = {part.module: Adaptable(part, ranks) for projection in spec.projections for part in projection.parts}
        for name, part in parts.items():
            self.add_module(name, part)
        self._parts = tuple(parts.values())
        self.o_proj = Linear(spec.output, ranks)
        self.q_norm = None if spec.query_norm is None else make_norm(spec.query_norm, ranks)
        self.k_norm = None if spec.key_norm is None else make_norm(spec.key_norm, ranks)
        self.pairs_neighbours = spec.pairs_neighbours
        scales = {one.name.rpartition(".")[2]: one for one in spec.parameters() if one.name.endswith("_scale")}
        self.k_scale, self.v_scale = (
            make_parameter(scales[name], ranks) if name in scales else None for name in ("k_scale", "v_scale")
        )
        derived = [one for one in spec.parameters() if isinstance(one.source, SlopeSource)]
        self.slopes = make_parameter(derived[0], ranks) if derived else None
        self.dtype = None if spec.state.dtype is None else TORCH_DTYPES[spec.state.dtype]
        self._norms_join_heads = spec.query_norm is not None and spec.query_norm.axis.is_divided

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, cache: KvCache, tokens: StepTokens
    ) -> tuple[Tensor, KvCache]:
        """Attends, and returns a new cache with the step's keys and values; the given one is left alone.

        Args:
            hidden: [rows, tokens, hidden_size], as what is returned.
            rotation: Cosines and sines, [rows, tokens, rotary_dim], in the dtype of attention or in float32; None:
                queries and keys stay as they are.
        """
        queries, keys, values = self._project(hidden if self.dtype is None else cast(hidden, self.dtype), tokens)
        if self.q_norm is not None:
            queries = self._normalize(self.q_norm, queries)
        if self.k_norm is not None:
            keys = self._normalize(self.k_norm, keys)
        if rotation is not None:
            if self.pairs_neighbours:
                queries, keys = (_part_neighbours(heads, rotation[0].shape[-1]) for heads in (queries, keys))
            queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
        # Scores, and sums of values, are linear: what keys and values are divided by, queries and outputs are times.
        queries, keys = self._scale_heads(queries, self.k_scale), _divide(keys, self.k_scale)
        values = _divide(values, self.v_scale)
        sinks = tree_mask = None
        attended, *written = torch.ops.kiln.attend(
            queries,
            keys,
            values,
            cache.keys,
            cache.values,
            tokens.positions,
            tokens.block_table,
            sinks,
            self.slopes,
            tree_mask,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            reads_cache=tokens.kind.reads_cache,
            max_context=tokens.kind.max_context,
        )
        attended = self._scale_heads(attended, self.v_scale)
        return cast(self.o_proj(attended.flatten(2), tokens), hidden.dtype), KvCache(*written)

    def _scale_heads(self, heads: Tensor, scale: Tensor | None) -> Tensor:
        """Multiplies query heads [rows, tokens, heads, head_dim] by the scales of the KV heads that they read."""
        if scale is None:
            return heads
        grouped = heads.view(*heads.shape[:2], self.num_kv_heads, -1, self.head_dim) * scale
        return cast(grouped.flatten(2, 3), heads.dtype)

    def _normalize(self, norm: nn.Module, heads: Tensor) -> Tensor:
        """Normalizes each head of [rows, tokens, heads, head_dim], or all of a token's as one."""
        normed: Tensor = norm(heads.flatten(2)).view(heads.shape) if self._norms_join_heads else norm(heads)
        return normed

    def _project(self, hidden: Tensor, tokens: StepTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [rows, tokens, heads, head_dim], keys and values [rows, tokens, kv_heads, head_dim]."""
        shared = SharedInput(hidden)
        projected = [self.get_submodule(name)(shared, tokens) for name in self._projections]
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if len(projected) == 1:
            # Graphs for Neuron refuse `split` with sizes.
            ends = [count * self.head_dim for count in accumulate(counts[:-1])]
            projected = list(projected[0].tensor_split(ends, dim=-1))
            for number, part in enumerate(self._parts):
                projected[number] = part.adapt(projected[number], hidden, tokens)
        queries, keys, values = (
            part.view(*part.shape[:-1], count, self.head_dim) for part, count in zip(projected, counts, strict=True)
        )
        return queries, keys, values


def _divide(heads: Tensor, scale: Tensor | None) -> Tensor:
    """Divides KV heads [rows, tokens, kv_heads, head_dim] by scales; those of heads that pad a rank's are zeros."""
    if scale is None:
        return heads
    divided = heads.unsqueeze(3) / scale.clamp(min=torch.finfo(scale.dtype).tiny)
    return cast(divided.squeeze(3), heads.dtype)


def _part_neighbours(heads: Tensor, rotary_dim: int) -> Tensor:
    """Puts neighbours among the first `rotary_dim` dimensions half of these apart, where `rotate` finds them.

    Scores stay: queries and keys change alike.
    """
    pairs = heads[..., :rotary_dim].reshape(*heads.shape[:-1], rotary_dim // 2, 2)
    parted = pairs.transpose(-1, -2).flatten(-2)
    return parted if rotary_dim == heads.shape[-1] else torch.cat((parted, heads[..., rotary_dim:]), dim=-1)
