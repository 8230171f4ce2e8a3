from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.models.head_layout import PADDING_HEAD, HeadLayout, KvSharding, lay_out_heads


def flat(heads: tuple[tuple[int, ...], ...]) -> list[int]:
    return [head for rank in heads for head in rank]


@pytest.mark.parametrize("tp_degree", [32, 64])
def test_56_query_heads_are_padded_in_8_groups(tp_degree: int) -> None:
    """56 to 64 heads with 8 KV heads: 7 real ones and 1 of zeros, eight times."""
    layout = lay_out_heads(56, 8, tp_degree)
    groups = [[*range(7 * group, 7 * group + 7), PADDING_HEAD] for group in range(8)]
    assert flat(layout.query_heads) == [head for group in groups for head in group]
    assert flat(layout.kv_heads) == [group for group in range(8) for _ in range(tp_degree // 8)]
    assert layout.sharding is KvSharding.REPLICATE


def test_24_query_heads_with_8_kv_heads_become_24_at_12_ranks() -> None:
    """NxD Inference comes to 72 KV heads here, padding by the count before the copying."""
    layout = lay_out_heads(24, 8, 12)
    assert layout.sharding is KvSharding.CONVERT_TO_MHA
    assert flat(layout.query_heads) == list(range(24))
    assert flat(layout.kv_heads) == [head // 3 for head in range(24)]
    assert layout.kv_heads[:2] == ((0, 0), (0, 1))


SPLIT, REPLICATE, CONVERT = KvSharding.SPLIT, KvSharding.REPLICATE, KvSharding.CONVERT_TO_MHA
#: Query and KV heads, ranks, how KV heads are shared, and what each rank holds of both; -1 for zeros.
LAYOUTS: list[Any] = [
    ((6, 3), 1, SPLIT, ((0, 1, 2, 3, 4, 5),), ((0, 1, 2),)),
    ((8, 4), 2, SPLIT, ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3))),
    ((8, 2), 4, REPLICATE, ((0, 1), (2, 3), (4, 5), (6, 7)), ((0,), (0,), (1,), (1,))),
    # MHA: both are padded at the end.
    ((7, 7), 2, CONVERT, ((0, 1, 2, 3), (4, 5, 6, -1)), ((0, 1, 2, 3), (4, 5, 6, -1))),
    ((3, 3), 4, CONVERT, ((0,), (1,), (2,), (-1,)), ((0,), (1,), (2,), (-1,))),
    # Fewer ranks than KV heads.
    ((6, 3), 2, CONVERT, ((0, 1, 2), (3, 4, 5)), ((0, 0, 1), (1, 2, 2))),
    # More ranks than KV heads.
    ((6, 3), 4, CONVERT, ((0, 1), (2, 3), (4, 5), (-1, -1)), ((0, 0), (1, 1), (2, 2), (-1, -1))),
    (
        (10, 5),
        4,
        CONVERT,
        ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, -1, -1)),
        ((0, 0, 1), (1, 2, 2), (3, 3, 4), (4, -1, -1)),
    ),
    # More ranks than query heads.
    ((2, 1), 4, REPLICATE, ((0,), (1,), (-1,), (-1,)), ((0,), (0,), (0,), (0,))),
]


@pytest.mark.parametrize(("counts", "tp_degree", "sharding", "queries", "keys"), LAYOUTS)
def test_layouts(counts: tuple[int, int], tp_degree: int, sharding: KvSharding, queries: Any, keys: Any) -> None:
    assert lay_out_heads(*counts, tp_degree) == HeadLayout(sharding, queries, keys)


@given(num_kv_heads=st.integers(1, 16), group_size=st.integers(1, 12), tp_degree=st.integers(1, 70))
def test_every_layout(num_kv_heads: int, group_size: int, tp_degree: int) -> None:
    """Each query head is held once, beside its KV head, and no rank holds more than another."""
    layout = lay_out_heads(num_kv_heads * group_size, num_kv_heads, tp_degree)
    assert len(layout.query_heads) == len(layout.kv_heads) == tp_degree
    assert {len(heads) for heads in layout.query_heads} == {layout.num_query_heads}
    assert {len(heads) for heads in layout.kv_heads} == {layout.num_kv_heads}
    assert layout.num_query_heads == -(-num_kv_heads * group_size // tp_degree)
    real = [head for head in flat(layout.query_heads) if head != PADDING_HEAD]
    assert real == list(range(num_kv_heads * group_size))
    assert set(flat(layout.kv_heads)) - {PADDING_HEAD} == set(range(num_kv_heads))
    per_kv_head, rest = divmod(layout.num_query_heads, layout.num_kv_heads)
    assert rest == 0
    for queries, keys in zip(layout.query_heads, layout.kv_heads, strict=True):
        for place, head in enumerate(queries):
            if head != PADDING_HEAD:
                assert keys[place // per_kv_head] == head // group_size
