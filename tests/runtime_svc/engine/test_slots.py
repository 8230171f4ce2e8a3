import pytest

from runtime_svc.engine.slots import SlotPool


def test_lowest_slot_comes_first() -> None:
    pool = SlotPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.free(2)
    pool.free(0)
    assert pool.allocate() == 0
    assert (pool.num_free, pool.num_used) == (1, 2)
    pool.check_integrity({0, 1})


@pytest.mark.parametrize("held", [set(), {0, 1}, {1}])
def test_integrity_notices_a_lost_slot(held: set[int]) -> None:
    pool = SlotPool(2)
    pool.allocate()
    with pytest.raises(AssertionError):
        pool.check_integrity(held)


def test_slot_cannot_be_freed_twice() -> None:
    pool = SlotPool(2)
    slot = pool.allocate()
    pool.free(slot)
    with pytest.raises(AssertionError, match="not held"):
        pool.free(slot)
