"""Slots of adapters, by hand; test_adapter_machine.py moves them at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundle.manifest import AdapterEviction
from runtime_svc.engine.adapters import AdapterSlots, AdapterWrite
from runtime_svc.engine.request import Adapter, Request
from tests.ranks.scheduling import make_request


def load(slots: AdapterSlots, name: str, digest: str = "") -> None:
    slots.load(name, Adapter(name, digest or name), {0: Path(digest or name)})


def make_slots(num_slots: int, policy: AdapterEviction = "lru") -> AdapterSlots:
    slots = AdapterSlots(num_slots, policy)
    for name in "abc":
        load(slots, name)
    return slots


def arrive(slots: AdapterSlots, name: str = "") -> Request:
    """A request with an adapter, or without, that waits."""
    request = make_request(name, 1, adapter=slots.find(name) if name else None)
    slots.join(request)
    return request


def start(slots: AdapterSlots, name: str) -> Request:
    request = arrive(slots, name)
    assert [*slots.list_startable([request])] == [request]
    slots.pin(request)
    return request


def use(slots: AdapterSlots, name: str, times: int = 1) -> None:
    """Requests that run one after the other."""
    for _ in range(times):
        slots.leave(start(slots, name))


def take_writes(slots: AdapterSlots) -> list[tuple[int, str]]:
    return [(write.slot, str(write.paths_by_rank[0])) for write in slots.take_writes()]


def list_startable(slots: AdapterSlots, *waiting: Request) -> list[str]:
    return [request.request_id for request in slots.list_startable(waiting)]


def test_an_adapter_is_written_when_a_request_starts_that_it_is_in_no_slot_for() -> None:
    slots = make_slots(2)
    first, second = start(slots, "a"), start(slots, "a")
    assert (first.adapter_slot, second.adapter_slot) == (0, 0)
    assert slots.take_writes() == [AdapterWrite(0, "a", {0: Path("a")})]
    use(slots, "b")
    assert take_writes(slots) == [(1, "b")]
    slots.leave(first)
    use(slots, "c")
    assert take_writes(slots) == [(1, "c")], "the second request still pins slot 0"
    slots.check_integrity([second], [])
    use(slots, "a")
    assert take_writes(slots) == [], "it is where it was"


def test_requests_without_an_adapter_have_no_slot_and_wait_for_none() -> None:
    slots = make_slots(1)
    start(slots, "a")
    request = arrive(slots)
    assert list_startable(slots, request) == [""]
    slots.pin(request)
    assert request.adapter_slot is None
    assert not slots.lacks_slot(request)


@pytest.mark.parametrize(("policy", "evicted"), [("lru", 0), ("lfu", 1)])
def test_the_policy_says_what_makes_room(policy: AdapterEviction, evicted: int) -> None:
    slots = make_slots(2, policy)
    use(slots, "a", times=3)
    use(slots, "b", times=2)
    assert start(slots, "c").adapter_slot == evicted


@pytest.mark.parametrize(("times", "evicted"), [(90, 1), (184, 0)])
def test_frequent_use_of_long_ago_counts_less(times: int, evicted: int) -> None:
    """After 128, 256 and 384 requests, counts are halved: of 200 and 184 in all, 34 and 78 are left."""
    slots = make_slots(2, "lfu")
    use(slots, "a", times=200)
    use(slots, "b", times=times)
    assert start(slots, "c").adapter_slot == evicted


def test_one_adapter_alone_is_held_back_for_one_that_waits() -> None:
    slots = make_slots(2)
    load(slots, "d")
    running = [start(slots, "a"), start(slots, "b")]
    waiting = [arrive(slots, name) for name in ("c", "a", "b", "", "c")]
    assert list_startable(slots, *waiting) == ["b", ""], "a has started no request for longer than b"
    assert slots.lacks_slot(waiting[0])
    slots.pin(waiting.pop(2))
    assert list_startable(slots, *waiting) == [""], "c still waits for the slot of a"
    slots.leave(running[0])
    assert list_startable(slots, *waiting) == ["c", "", "c"]
    assert not slots.lacks_slot(waiting[0])
    assert list_startable(slots, *waiting, arrive(slots, "b")) == ["c", "", "c"], "a waits for the slot of b"


def test_each_adapter_that_waits_holds_back_one() -> None:
    slots = make_slots(2)
    load(slots, "d")
    for name in ("a", "b"):
        start(slots, name)
    waiting = [arrive(slots, name) for name in ("c", "d", "a", "b", "")]
    assert list_startable(slots, *waiting) == [""]
    assert list_startable(slots, *waiting[2:]) == ["a", "b", ""]


def test_what_is_older_than_the_one_that_waits_is_not_held_back() -> None:
    slots = make_slots(1)
    start(slots, "a")
    assert list_startable(slots, *(arrive(slots, name) for name in ("a", "b", "a"))) == ["a"]


def test_an_unloaded_adapter_stays_until_its_requests_have_ended() -> None:
    slots = make_slots(2)
    running, waiting = start(slots, "a"), arrive(slots, "a")
    take_writes(slots)
    slots.unload("a")
    slots.unload("a")
    assert slots.find("a") is None
    assert list_startable(slots, waiting) == ["a"]
    slots.leave(running)
    slots.check_integrity([], [waiting])
    assert slots.is_loaded("a")
    slots.leave(waiting)
    slots.check_integrity([], [])
    assert not slots.is_loaded("a")
    use(slots, "b")
    assert take_writes(slots) == [(0, "b")], "its slot is empty"


def test_a_name_that_is_loaded_again_leaves_its_requests_the_old_bytes() -> None:
    slots = make_slots(2)
    old, waits = start(slots, "a"), arrive(slots, "a")
    load(slots, "a", "other")
    new = start(slots, "a")
    assert take_writes(slots) == [(0, "a"), (1, "other")]
    slots.pin(waits)
    assert (old.adapter_slot, waits.adapter_slot, new.adapter_slot) == (0, 0, 1)
    for request in (old, waits):
        slots.leave(request)
    assert not slots.is_loaded("a")
    assert slots.is_loaded("other")
    slots.check_integrity([new], [])


def test_loading_the_same_again_changes_nothing() -> None:
    slots = make_slots(1)
    request = start(slots, "a")
    take_writes(slots)
    load(slots, "a")
    use(slots, "a")
    assert take_writes(slots) == []
    slots.check_integrity([request], [])


def test_two_names_of_the_same_bytes_have_one_slot() -> None:
    slots = make_slots(1)
    load(slots, "alias", "a")
    running = [start(slots, "a"), start(slots, "alias")]
    assert [request.adapter_slot for request in running] == [0, 0]
    slots.unload("a")
    for request in running:
        slots.leave(request)
    assert slots.is_loaded("a"), "the alias means it"


def test_an_adapter_that_is_gone_before_it_is_written_is_not_written() -> None:
    slots = make_slots(1)
    request = start(slots, "a")
    slots.unload("a")
    slots.leave(request)
    assert take_writes(slots) == []


def test_other_ranks_have_empty_slots() -> None:
    slots = make_slots(2)
    use(slots, "a")
    use(slots, "b")
    slots.reset()
    assert take_writes(slots) == [], "what was ordered is gone with the ranks"
    use(slots, "b")
    assert take_writes(slots) == [(0, "b")]


def test_a_request_whose_adapter_is_not_loaded_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="adapter z of r is not loaded"):
        make_slots(1).join(make_request("r", 1, adapter=Adapter("z", "z")))
