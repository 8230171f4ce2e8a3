from itertools import compress, product

import pytest

from runtime_svc.deployments.cores import CorePool, CoreState
from runtime_svc.errors import CoresUnavailable, RequestInvalid


def test_lowest_free_cores_are_placed() -> None:
    pool = CorePool(4)
    assert pool.reserve("demo", 1, [2]) == (2,)
    assert pool.reserve("demo", 2, []) == (0, 1)
    assert pool.free == (3,)
    pool.release((0, 1))
    assert pool.reserve("demo", 3, []) == (0, 1, 3)


def test_ranges_are_preferred_to_scattered_cores() -> None:
    pool = CorePool(6)
    pool.reserve("demo", 1, [1])
    assert pool.reserve("demo", 2, []) == (2, 3)
    assert pool.reserve("demo", 1, []) == (0,)
    assert pool.reserve("demo", 2, [], (5, 4)) == (5, 4)


def test_cores_of_before_are_taken_where_they_are_free() -> None:
    pool = CorePool(4)
    pool.reserve("demo", 1, [3])
    assert pool.reserve("demo", 2, [], (3, 2)) == (0, 1)
    assert pool.reserve("demo", 1, [], (2,)) == (2,)


def test_refusal_takes_nothing() -> None:
    pool = CorePool(2)
    pool.reserve("demo", 1, [0])
    with pytest.raises(CoresUnavailable, match=r"needs 2 cores; free cores: 1; demo holds 0\. Unload a deployment"):
        pool.reserve("other", 2, [])
    with pytest.raises(CoresUnavailable, match="cores 0 are wanted"):
        pool.reserve("demo", 1, [0])
    with pytest.raises(RequestInvalid, match="1 different cores"):
        pool.reserve("demo", 1, [1, 1])
    assert pool.free == (1,)


def test_core_is_released_once() -> None:
    pool = CorePool(2)
    cores = pool.reserve("demo", 2, [])
    pool.release(cores)
    with pytest.raises(AssertionError):
        pool.release(cores)


def test_refusal_says_who_holds_the_cores() -> None:
    pool = CorePool(4)
    pool.reserve("b", 2, [3, 0])
    pool.reserve("a", 2, [])
    with pytest.raises(CoresUnavailable, match=r"free cores: none; a holds 1, 2; b holds 0, 3\. Unload") as caught:
        pool.reserve("c", 1, [])
    assert caught.value.metadata["held"] == "a holds 1, 2; b holds 0, 3"
    pool.release((1, 2))
    assert pool.held == {"b": (0, 3)}


def test_broken_cores_are_given_to_nobody() -> None:
    pool = CorePool(3)
    pool.reserve("demo", 1, [1])
    pool.require_working([1])
    pool.note_broken(1)
    with pytest.raises(CoresUnavailable, match=r"cores 1 need a reset of the device, and a restart of the runtime"):
        pool.require_working([0, 1])
    pool.release([1])
    assert (pool.free, pool.broken) == ((0, 2), (1,))
    with pytest.raises(CoresUnavailable, match="cores 1 are wanted"):
        pool.reserve("demo", 1, [1])
    assert pool.reserve("demo", 2, []) == (0, 2)


def test_every_core_is_in_one_state() -> None:
    pool = CorePool(4)
    pool.reserve("demo", 2, [])
    pool.note_broken(1)
    pool.note_broken(3)
    assert {state.value: pool.list_in(state) for state in CoreState} == {
        "free": (2,),
        "in_use": (0,),
        "broken": (1, 3),
    }


class TestRuns:
    """Pools whose deployments have cores that follow each other."""

    def test_scattered_cores_are_refused_with_what_is_free(self) -> None:
        pool = CorePool(4, in_runs=True)
        pool.reserve("demo", 1, [1])
        with pytest.raises(CoresUnavailable, match=r"needs 3 cores that follow each other; free cores: 0, 2, 3; demo"):
            pool.reserve("other", 3, [])
        assert pool.reserve("other", 2, []) == (2, 3)

    @pytest.mark.parametrize("wanted", [(0, 2), (1, 0), (2, 2)])
    def test_wanted_cores_that_do_not_follow_each_other(self, wanted: tuple[int, int]) -> None:
        pool = CorePool(4, in_runs=True)
        with pytest.raises(RequestInvalid, match="2 cores that follow each other, ascending, one for each rank"):
            pool.reserve("demo", 2, wanted)
        assert pool.reserve("demo", 2, (2, 3)) == (2, 3)

    def test_cores_of_before_are_taken_only_as_a_run(self) -> None:
        pool = CorePool(4, in_runs=True)
        assert pool.reserve("demo", 2, (), (3, 1)) == (0, 1)
        assert pool.reserve("other", 2, (), (2, 3)) == (2, 3)
        assert pool.reserve("failed before", 0, (), ()) == ()

    def test_every_pool_gives_the_lowest_free_run_or_nothing(self) -> None:
        """All ways in which the cores of a small host can be held, broken or free, by all numbers of ranks."""
        size = 6
        for states in product(CoreState, repeat=size):
            pool = CorePool(size, in_runs=True)
            for core, state in enumerate(states):
                if state is CoreState.IN_USE:
                    pool.reserve(f"holder of {core}", 1, [core])
                if state is CoreState.BROKEN:
                    pool.note_broken(core)
            free = [state is CoreState.FREE for state in states]
            assert pool.free == tuple(compress(range(size), free))
            for num_ranks in range(1, size + 1):
                fitting = [start for start in range(size - num_ranks + 1) if all(free[start : start + num_ranks])]
                if not fitting:
                    with pytest.raises(CoresUnavailable) as caught:
                        pool.reserve("new", num_ranks, [])
                    assert caught.value.metadata["free_cores"] == (", ".join(map(str, pool.free)) or "none")
                    continue
                cores = pool.reserve("new", num_ranks, [])
                assert cores == tuple(range(fitting[0], fitting[0] + num_ranks))
                pool.release(cores)
