"""Which attention heads each tensor-parallel rank holds: copied, padded and ordered so that all ranks are alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

#: Stands where a rank holds a head of zeros.
PADDING_HEAD: Final = -1


class KvSharding(Enum):
    """How KV heads come to the ranks."""

    #: Every rank holds as many, none twice.
    SPLIT = "split"
    #: Every rank holds one; neighbours hold copies. NxD Inference's REPLICATE_TO_TP_DEGREE.
    REPLICATE = "replicate"
    #: Every query head has a copy of its own. NxD Inference's CONVERT_TO_MHA.
    CONVERT_TO_MHA = "convert_to_mha"


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The checkpoint's heads that each rank holds, in the rank's order; `PADDING_HEAD` is a head of zeros.

    All ranks hold equally many. A rank's KV head i serves its query heads i * n to (i + 1) * n - 1, where n is how many
    query heads it has to a KV head: attention needs no other knowledge of the layout.
    """

    sharding: KvSharding
    query_heads: tuple[tuple[int, ...], ...]
    kv_heads: tuple[tuple[int, ...], ...]

    @property
    def num_query_heads(self) -> int:
        """Query heads of one rank, padding included."""
        return len(self.query_heads[0])

    @property
    def num_kv_heads(self) -> int:
        """KV heads of one rank, copies and padding included."""
        return len(self.kv_heads[0])


def choose_kv_sharding(num_kv_heads: int, tp_degree: int) -> KvSharding:
    """How to divide KV heads among ranks without tearing a group of query heads from its KV head."""
    if num_kv_heads % tp_degree == 0:
        return KvSharding.SPLIT
    if tp_degree % num_kv_heads == 0:
        return KvSharding.REPLICATE
    return KvSharding.CONVERT_TO_MHA


@lru_cache
def lay_out_heads(num_query_heads: int, num_kv_heads: int, tp_degree: int) -> HeadLayout:
    """Divides heads among ranks; `num_query_heads` is a multiple of `num_kv_heads`.

    Query heads are padded to a multiple of the ranks: behind each KV head's group where KV heads are replicated, so
    that every rank's query heads share one KV head; at the end where each query head has a KV head of its own.
    """
    sharding = choose_kv_sharding(num_kv_heads, tp_degree)
    group_size = num_query_heads // num_kv_heads
    queries: list[int] = list(range(num_query_heads))
    keys: list[int] = list(range(num_kv_heads))
    padded_count = -(-num_query_heads // tp_degree) * tp_degree
    padding = [PADDING_HEAD] * (padded_count - num_query_heads)
    match sharding:
        case KvSharding.REPLICATE:
            keys = [head for head in keys for _ in range(tp_degree // num_kv_heads)]
            group_padding = padding[: len(padding) // num_kv_heads]
            groups = (queries[start : start + group_size] for start in range(0, num_query_heads, group_size))
            queries = [head for group in groups for head in [*group, *group_padding]]
        case KvSharding.CONVERT_TO_MHA:
            # Padded after the copying: NxD Inference pads by the count before it, which only fits plain MHA.
            keys = [head // group_size for head in queries] + padding
            queries += padding
    return HeadLayout(sharding, _divide(queries, tp_degree), _divide(keys, tp_degree))


def _divide(heads: list[int], tp_degree: int) -> tuple[tuple[int, ...], ...]:
    count = len(heads) // tp_degree
    return tuple(tuple(heads[rank * count : (rank + 1) * count]) for rank in range(tp_degree))
