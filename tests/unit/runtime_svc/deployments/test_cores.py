import pytest

from runtime_svc.deployments.cores import CorePool
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
