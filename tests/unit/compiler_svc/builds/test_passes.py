import pytest

from compiler_svc.builds.weight_stage import MAX_PASSES, divide_into_passes


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 9, 63, 64])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_a_checkpoint_is_read_a_bounded_number_of_times(num_ranks: int, num_threads: int) -> None:
    # As if some ranks had been written before.
    ranks = [3 * rank for rank in range(num_ranks)]
    passes = list(divide_into_passes(ranks, num_threads))
    assert [rank for one in passes for rank in one] == ranks
    assert len(passes) <= MAX_PASSES
    assert all(len(one) >= num_threads for one in passes[:-1]), "every thread has a rank"


def test_nothing_is_read_if_no_rank_is_missing() -> None:
    assert list(divide_into_passes([], 2)) == []
