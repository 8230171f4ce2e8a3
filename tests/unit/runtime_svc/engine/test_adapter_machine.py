"""Slots of adapters at random, beside ranks that hold what is written: a request reads the bytes that it came with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bundle.manifest import AdapterEviction
from runtime_svc.engine.adapters import AdapterSlots
from runtime_svc.engine.request import Adapter, Request
from tests.ranks.scheduling import make_request

#: More adapters than slots.
NAMES = "abcd"
CHOICE = st.randoms(use_true_random=False)


class AdapterMachine(RuleBasedStateMachine):
    """Loads, unloads, requests that come, start and end, steps, and ranks that are lost, in any order."""

    @initialize(num_slots=st.integers(1, 3), policy=st.sampled_from(get_args(AdapterEviction)))
    def begin(self, num_slots: int, policy: AdapterEviction) -> None:
        self.slots = AdapterSlots(num_slots, policy)
        self.num_slots = num_slots
        self.names: dict[str, str] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        #: Of those that run, the ones that a step has computed.
        self.computed: set[Request] = set()
        #: By slot, the digest of what the ranks hold.
        self.written: dict[int, str] = {}
        self.num_requests = 0
        for name in NAMES:
            self.load(name, 0)

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 1))
    def load(self, name: str, version: int) -> None:
        """A name gets other bytes, the same, or those that another name has."""
        digest = f"{name}{version}" if name != "d" else "a0"
        self.slots.load(name, Adapter(name, digest), {0: Path(digest)})
        self.names[name] = digest

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.slots.unload(name)
        self.names.pop(name, None)

    @rule(name=st.sampled_from(["", *NAMES]))
    def arrive(self, name: str) -> None:
        adapter = self.slots.find(name)
        assert (None if adapter is None else adapter.digest) == self.names.get(name)
        if adapter is None and name:
            return
        self.num_requests += 1
        request = make_request(f"{self.num_requests}", 1, adapter=adapter)
        self.slots.join(request)
        self.waiting.append(request)

    @rule(choice=CHOICE, share=st.sampled_from([0.5, 1.0, 1.0]))
    def start(self, choice: random.Random, share: float) -> None:
        """The oldest that may start do so, but some for which there is no room, and a step follows."""
        self.start_all([one for one in self.slots.list_startable(self.waiting) if choice.random() < share])

    @rule(choice=CHOICE)
    def end(self, choice: random.Random) -> None:
        requests = [*self.running, *self.waiting]
        if requests:
            self.end_one(choice.choice(requests))

    # Seldom, because it ends all that runs.
    @precondition(lambda self: self.num_requests % 8 == 7)
    @rule()
    def lose_ranks(self) -> None:
        for request in [*self.running]:
            self.end_one(request)
        self.slots.reset()
        self.written.clear()

    @invariant()
    def counts_are_right_and_files_are_kept_as_long_as_needed(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check_integrity(self.running, self.waiting)
        used = {one.adapter.digest for one in (*self.running, *self.waiting) if one.adapter is not None}
        for digest in ("a0", "a1", "b0", "b1", "c0", "c1"):
            assert self.slots.is_loaded(digest) is (digest in used or digest in self.names.values())

    @invariant()
    def only_those_wait_that_must(self) -> None:
        if not hasattr(self, "slots"):
            return
        startable = [*self.slots.list_startable(self.waiting)]
        assert startable == [one for one in self.waiting if one in startable], "the order is that of arrival"
        pinned = self.list_pinned()
        held_up = [one for one in self.waiting if one not in startable]
        assert all(one.adapter is not None for one in held_up)
        oldest = next((one for one in self.waiting if one.adapter is not None), None)
        if oldest is not None:
            assert (oldest in held_up) is self.slots.lacks_slot(oldest)
        # Each adapter that lacks a slot holds back the requests of one other.
        lacking = {one.adapter.digest for one in held_up if one.adapter is not None} - pinned
        starting = {one.adapter.digest for one in startable if one.adapter is not None}
        assert len(pinned | starting) <= self.num_slots
        if lacking:
            assert len(pinned | starting) == self.num_slots, "a slot is left"
        adapters_held_back = {one.adapter.digest for one in held_up if one.adapter is not None} & pinned
        assert len(adapters_held_back) <= len(lacking)

    def teardown(self) -> None:
        """No request waits forever, however many come of the adapters that are in slots."""
        if not hasattr(self, "slots"):
            return
        patient = [*self.waiting]
        for _ in range(3 * len(patient) + 1):
            for name, digest in self.names.items():
                if digest in self.list_pinned():
                    self.arrive(name)
            before = [*self.running]
            self.start_all([*self.slots.list_startable(self.waiting)])
            for request in before:
                # It ran beside those that have just started.
                self.end_one(request)
        assert not {*patient} & {*self.waiting}, "others overtake without end"

    def start_all(self, requests: list[Request]) -> None:
        for request in requests:
            self.slots.pin(request)
            self.waiting.remove(request)
            self.running.append(request)
        for write in self.slots.take_writes():
            pinning = {one for one in self.running if one.adapter_slot == write.slot}
            assert not pinning & self.computed, "a slot is written while a request reads it"
            self.written[write.slot] = str(write.paths_by_rank[0])
        for request in self.running:
            if request.adapter is not None:
                assert request.adapter_slot is not None
                assert self.written[request.adapter_slot] == request.adapter.digest
        self.computed = {*self.running}

    def end_one(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.computed.discard(request)
        self.slots.leave(request)

    def list_pinned(self) -> set[str]:
        return {request.adapter.digest for request in self.running if request.adapter is not None}


AdapterMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAdapterMachine = AdapterMachine.TestCase
