"""Bytes of one rank's weights, by group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from bundle.manifest import DTYPE_SIZES_BYTES
from compiler_svc.models.llama_config import LlamaConfig
from compiler_svc.models.llama_tensors import EMBEDDING, LM_HEAD
from compiler_svc.models.shares import share_of
from compiler_svc.planning.quantization import WeightQuantization
from compiler_svc.sharding.plan import WeightPlan, cut_tensor
from compiler_svc.weights.checkpoint import TensorHeader

#: In the order in which they are listed.
WEIGHT_GROUPS: Final = ("embedding", "attention", "mlp", "norm", "lm_head", "draft", "derived")


def measure_weights(plan: WeightPlan, quantization: WeightQuantization | None) -> dict[str, int]:
    """Bytes of each group in one rank's shard; all ranks hold as many."""
    groups = dict.fromkeys(WEIGHT_GROUPS, 0)
    for tensor in plan.tensors:
        group = "derived" if tensor.source is None else group_of(tensor.name)
        if quantization is not None and tensor.source is not None and quantization.applies_to(tensor.name):
            groups[group] += quantization.size_bytes(plan.rank_shape(tensor))
        else:
            groups[group] += plan.rank_size_bytes(tensor)
    return groups


def group_of(name: str) -> str:
    """The group of a tensor of the checkpoint."""
    if name == EMBEDDING:
        return "embedding"
    if name == LM_HEAD:
        return "lm_head"
    if "norm" in name:
        return "norm"
    return "attention" if ".self_attn." in name else "mlp"


def measure_draft_weights(
    headers: Iterable[TensorHeader],
    config: LlamaConfig,
    *,
    item_bytes: int,
    tp_degree: int,
    quantization: WeightQuantization | None,
) -> int:
    """Bytes of a draft model in one rank, whatever tensors its checkpoint has: EAGLE's are no whole model.

    A tensor whose name is none of the family's, such as EAGLE's `fc`, is held whole by every rank.
    """
    total = 0
    for header in headers:
        cut = cut_tensor(config, header.name, header.shape, tp_degree)
        shape = header.shape
        if cut is not None:
            shape = (*shape[: cut.axis], cut.length, *shape[cut.axis + 1 :])
        if quantization is not None and quantization.applies_to(header.name):
            total += quantization.size_bytes(shape)
        else:
            total += math.prod(shape) * item_bytes
    return total


def measure_medusa_heads(config: LlamaConfig, num_heads: int, *, item_bytes: int, tp_degree: int) -> int:
    """Bytes of Medusa heads in one rank: each a residual layer, held whole, and a head over the vocabulary, divided."""
    hidden = config.hidden_size
    residual = hidden * hidden + hidden
    return num_heads * (residual + share_of(config.vocab_size, tp_degree) * hidden) * item_bytes


def item_bytes_of(dtype: str) -> int:
    """Bytes of one item of a dtype of weights, activations or KV cache."""
    return dict(DTYPE_SIZES_BYTES)[dtype]  # type: ignore[index]
