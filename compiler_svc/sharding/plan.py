"""The weight plan: every tensor of a rank shard, where it comes from and how it is cut."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, cast

from bundle.manifest import DTYPE_SIZES_BYTES, DType, WeightShard, WeightTensor
from compiler_svc.models.head_layout import lay_out_heads
from compiler_svc.models.llama_config import LlamaConfig
from compiler_svc.models.llama_tensors import (
    EMBEDDING,
    LM_HEAD,
    RANK,
    checkpoint_tensors,
    derived_tensors,
    is_redundant,
)
from compiler_svc.sharding.cut import Cut, cut_evenly, cut_heads
from compiler_svc.sharding.errors import ShardingNotServed
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid

CastType = Literal["config", "as-declared"]

#: Dtypes of checkpoint tensors that can be cast to a computation dtype.
CASTABLE_DTYPES: Final = ("bfloat16", "float16", "float32", "float64")


class Split(Enum):
    """How a tensor is divided among ranks; see `cut_tensor`."""

    #: Every rank holds all of it.
    REPLICATED = "replicated"
    #: Equal parts of the first axis: outputs of a column-parallel matrix.
    COLUMN = "column"
    #: Equal parts of the second axis: inputs of a row-parallel matrix, or the hidden axis of the embedding.
    ROW = "row"
    #: The first axis, in the query heads of the layout.
    QUERY_HEADS = "query_heads"
    #: The second axis, in the query heads of the layout.
    QUERY_HEAD_INPUTS = "query_head_inputs"
    #: The first axis, in the KV heads of the layout.
    KV_HEADS = "kv_heads"


#: First match wins. Biases of row-parallel matrices are added once, after the sum over ranks.
SPLIT_RULES: Final = (
    (re.compile(r"lm_head\.weight|.*\.(gate_proj|up_proj)\.(weight|bias)"), Split.COLUMN),
    (re.compile(r"model\.embed_tokens\.weight|.*\.down_proj\.weight"), Split.ROW),
    (re.compile(r".*\.q_proj\.(weight|bias)"), Split.QUERY_HEADS),
    (re.compile(r".*\.o_proj\.weight"), Split.QUERY_HEAD_INPUTS),
    (re.compile(r".*\.(k_proj|v_proj)\.(weight|bias)"), Split.KV_HEADS),
    (re.compile(r".*"), Split.REPLICATED),
)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of every rank shard.

    Attributes:
        name: Name in the shard, and of the model's parameter.
        source: Checkpoint tensor that it is cut from; None where it is derived from configuration or rank.
        shape: Whole shape, before cutting.
        dtype: Dtype in the shard.
        cut: How it is divided among ranks; None: every rank holds all of it.
    """

    name: str
    source: str | None
    shape: tuple[int, ...]
    dtype: DType
    cut: Cut | None


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of a model's shards, in the order of the model."""

    config: LlamaConfig
    tp_degree: int
    tensors: tuple[PlannedTensor, ...]

    def rank_shape(self, tensor: PlannedTensor) -> tuple[int, ...]:
        """Shape of a tensor's part; equal for all ranks."""
        if tensor.cut is None:
            return tensor.shape
        axis = tensor.cut.axis
        return (*tensor.shape[:axis], tensor.cut.length, *tensor.shape[axis + 1 :])

    def rank_size_bytes(self, tensor: PlannedTensor) -> int:
        """Bytes of a tensor's part."""
        return math.prod(self.rank_shape(tensor)) * DTYPE_SIZES_BYTES[tensor.dtype]

    @property
    def shard_size_bytes(self) -> int:
        """Bytes of the tensors of one rank's shard."""
        return sum(map(self.rank_size_bytes, self.tensors))

    def describe_shard(self, rank: int, blob: str | None, size_bytes: int) -> WeightShard:
        """The manifest's record of a shard file.

        Args:
            blob: Digest of the file; None where there is none yet.
            size_bytes: Size of the file; 0 where there is none.
        """
        tensors = (WeightTensor(name=t.name, dtype=t.dtype, shape=self.rank_shape(t)) for t in self.tensors)
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
        return WeightShard(rank=rank, blob=blob, size_bytes=size_bytes, tensors=ordered)


def plan_weights(
    config: LlamaConfig, checkpoint: Checkpoint, *, dtype: DType, cast_type: CastType, tp_degree: int
) -> WeightPlan:
    """Plans the shards of a checkpoint, from its headers.

    Args:
        dtype: Dtype of the computation.
        cast_type: `config` stores weights in `dtype`, `as-declared` in the checkpoint's dtypes.

    Raises:
        CheckpointInvalid: A tensor is missing, unexpected, or of the wrong shape or dtype.
        ShardingNotServed: The model has too little for `tp_degree` ranks.
    """
    check_tp_degree(config, tp_degree)
    expected = checkpoint_tensors(config)
    _check_tensors(config, checkpoint, expected)

    def plan(name: str, source: str) -> PlannedTensor:
        declared = checkpoint.tensors[source].dtype
        stored = declared if cast_type == "as-declared" and declared in DTYPE_SIZES_BYTES else dtype
        cut = cut_tensor(config, name, expected[source], tp_degree)
        return PlannedTensor(name, source, expected[source], cast("DType", stored), cut)

    tensors = [plan(name, name) for name in expected]
    if config.tie_word_embeddings and tp_degree > 1:
        # The embedding is cut along the hidden axis and the head along the vocabulary: the ranks need both.
        tensors.append(plan(LM_HEAD, EMBEDDING))
    for name, shape in derived_tensors(config).items():
        tensors.append(PlannedTensor(name, None, shape, "float32", cut=None))
    if tp_degree > 1:
        tensors.append(PlannedTensor(RANK, None, (1,), "int32", cut=None))
    return WeightPlan(config, tp_degree, tuple(tensors))


def check_tp_degree(config: LlamaConfig, tp_degree: int) -> None:
    """Checks that there is something of every axis for each of `tp_degree` ranks; heads are padded as needed.

    Raises:
        ShardingNotServed: There is not.
    """
    for attribute in ("hidden_size", "intermediate_size", "vocab_size"):
        if getattr(config, attribute) < tp_degree:
            raise ShardingNotServed(tp_degree, attribute, getattr(config, attribute))


def cut_tensor(config: LlamaConfig, name: str, shape: tuple[int, ...], tp_degree: int) -> Cut | None:
    """How a tensor is divided among ranks, by its name; None: every rank holds all of it.

    Args:
        shape: Whole shape.
    """
    split = next(split for pattern, split in SPLIT_RULES if pattern.fullmatch(name))
    heads = lay_out_heads(config.num_attention_heads, config.num_key_value_heads, tp_degree)
    match split:
        case Split.COLUMN:
            return cut_evenly(0, shape[0], tp_degree)
        case Split.ROW:
            return cut_evenly(1, shape[1], tp_degree)
        case Split.QUERY_HEADS:
            return cut_heads(0, heads.query_heads, config.head_dim)
        case Split.QUERY_HEAD_INPUTS:
            return cut_heads(1, heads.query_heads, config.head_dim)
        case Split.KV_HEADS:
            return cut_heads(0, heads.kv_heads, config.head_dim)
    return None


def _check_tensors(config: LlamaConfig, checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        header = checkpoint.tensors.get(name)
        if header is None:
            raise CheckpointInvalid(checkpoint.path, name, "missing", f"a tensor of shape {list(shape)}")
        if header.shape != shape:
            raise CheckpointInvalid(
                checkpoint.path, name, f"shape {list(header.shape)}", f"shape {list(shape)}, as config.json says"
            )
        if header.dtype not in CASTABLE_DTYPES:
            raise CheckpointInvalid(
                checkpoint.path, name, f"dtype {header.dtype}", f"one of {', '.join(CASTABLE_DTYPES)}"
            )
    for name in checkpoint.tensors:
        if name not in expected and not is_redundant(name, config):
            raise CheckpointInvalid(checkpoint.path, name, "unexpected", "only tensors that config.json accounts for")
