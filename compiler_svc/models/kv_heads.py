"""Which KV heads a tensor-parallel rank holds."""

from __future__ import annotations


def kv_heads_of_rank(num_kv_heads: int, rank: int, tp_degree: int) -> tuple[int, ...]:
    """The checkpoint's KV heads that a rank holds, in order. With more ranks than heads, neighbours hold copies."""
    if tp_degree > num_kv_heads:
        return (rank * num_kv_heads // tp_degree,)
    per_rank = num_kv_heads // tp_degree
    return tuple(range(rank * per_rank, (rank + 1) * per_rank))
