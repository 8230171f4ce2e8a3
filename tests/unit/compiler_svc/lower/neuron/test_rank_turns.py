"""Ranks of one process: their collectives, and what a rank that fails or calls others does to the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compiler_svc.lower.neuron.rank_turns import RankTurns
from execution.collectives.operators import CollectiveError

Compute = Callable[[], torch.Tensor]


def make_rank(rank: int) -> Compute:
    def compute() -> torch.Tensor:
        total = torch.ops.kiln.all_reduce(torch.tensor([1.0, 2.0]) * (rank + 1), 3)
        gathered: torch.Tensor = torch.ops.kiln.all_gather(total + rank, 3)
        return gathered

    return compute


def fail() -> torch.Tensor:
    raise ValueError("this rank fails")


def call_nothing() -> torch.Tensor:
    return torch.zeros(1)


def test_collectives_join_what_the_ranks_give_in_their_order() -> None:
    turns = RankTurns(3)
    for _ in range(2):
        results = turns.run([make_rank(rank) for rank in range(3)])
        for result in results:
            assert result.tolist() == [6.0, 12.0, 7.0, 13.0, 8.0, 14.0]


def test_one_rank_needs_no_other() -> None:
    assert RankTurns(1).run([call_nothing])[0].tolist() == [0.0]


@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize(
    ("compute", "error", "said"),
    [(fail, ValueError, "this rank fails"), (call_nothing, CollectiveError, "3 ranks that 2 take part in")],
)
def test_no_rank_waits_for_one_that_has_ended(other: int, compute: Compute, error: type[Exception], said: str) -> None:
    ranks = [make_rank(rank) for rank in range(3)]
    ranks[other] = compute
    with pytest.raises(error, match=said):
        RankTurns(3).run(ranks)
