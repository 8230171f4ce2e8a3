from collections import Counter
from typing import Literal

import pytest

from compiler_svc.models.divisions import Axis, ByHeads, Evenly, Run, join_axes


@pytest.mark.parametrize(
    ("length", "tp_degree", "runs"),
    [
        (8, 2, ((Run(0, 4),), (Run(4, 4),))),
        (7, 2, ((Run(0, 4),), (Run(4, 3), Run(None, 1)))),
        # Four parts of two, of which the last ones have nothing of the axis left.
        (5, 4, ((Run(0, 2),), (Run(2, 2),), (Run(4, 1), Run(None, 1)), (Run(None, 2),))),
    ],
)
def test_equal_parts_with_zeros_behind_the_end(length: int, tp_degree: int, runs: tuple[tuple[Run, ...], ...]) -> None:
    axis = Axis(length, Evenly())
    assert axis.divide(tp_degree) == runs
    assert axis.part_length(tp_degree) == sum(run.length for run in runs[0])


def test_every_rank_holds_all_of_a_whole_axis() -> None:
    axis = Axis(5)
    assert not axis.is_divided
    assert axis.divide(3) == ((Run(0, 5),),) * 3
    assert axis.part_length(3) == 5


def test_neighbouring_heads_are_one_run() -> None:
    """Six query heads of two KV heads on four ranks: groups of three are padded to four."""
    queries, keys = ByHeads("query", 6, 2, 10), ByHeads("kv", 6, 2, 10)
    assert Axis(60, queries).divide(4) == (
        (Run(0, 20),),
        (Run(20, 10), Run(None, 10)),
        (Run(30, 20),),
        (Run(50, 10), Run(None, 10)),
    )
    assert Axis(20, keys).divide(4) == ((Run(0, 10),), (Run(0, 10),), (Run(10, 10),), (Run(10, 10),))


def test_parts_of_a_joined_axis_are_divided_by_themselves() -> None:
    queries, keys = ByHeads("query", 4, 2, 3), ByHeads("kv", 4, 2, 3)
    axis = join_axes(Axis(12, queries), Axis(6, keys), Axis(6, keys))
    assert axis.is_divided
    assert axis.length == 24
    assert axis.part_length(2) == 12
    assert axis.divide(2) == (
        (Run(0, 6), Run(12, 3), Run(18, 3)),
        (Run(6, 6), Run(15, 3), Run(21, 3)),
    )
    # One rank holds the whole axis, in one run.
    assert axis.divide(1) == ((Run(0, 24),),)


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), [(8, 8), (8, 2), (6, 1), (6, 3), (14, 2), (5, 5)])
@pytest.mark.parametrize("kind", ["query", "kv"])
@pytest.mark.parametrize("tp_degree", [1, 2, 3, 4, 8])
def test_all_entries_have_equally_many_copies(
    kind: Literal["query", "kv"], num_query_heads: int, num_kv_heads: int, tp_degree: int
) -> None:
    division = ByHeads(kind, num_query_heads, num_kv_heads, 2)
    axis = Axis(2 * (num_query_heads if kind == "query" else num_kv_heads), division)
    held = Counter(
        entry
        for runs in axis.divide(tp_degree)
        for run in runs
        if run.start is not None
        for entry in range(run.start, run.start + run.length)
    )
    assert held == dict.fromkeys(range(axis.length), axis.count_copies(tp_degree))
