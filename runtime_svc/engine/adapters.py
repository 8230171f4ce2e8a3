"""Which LoRA adapters are in the slots of the ranks, and which requests use them.

The ranks have a few slots, each with room for one adapter; more adapters may be loaded than there are slots. A running
request pins the slot of its adapter, so that nothing else is written there. This is bookkeeping alone: the engine
writes the slots, between two steps, as `AdapterSlots.take_writes` orders.

An adapter is its digest. A request has that which its key meant when it came, so a key that gets other bytes changes
nothing for it. Keys are the caller's: names of adapters belong to principals, of whom this knows nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bundle.manifest import AdapterEviction
from runtime_svc.engine.request import Adapter, Request

#: Requests after which the counts of all adapters are halved, NxD Inference's default `lfu_decay_period`: what was used
#: often long ago makes room for what is used now.
DECAY_PERIOD: Final = 128


class AdapterWrite(msgspec.Struct, frozen=True):
    """An order to write an adapter into a slot of every rank; each rank has a file of its own."""

    slot: int
    digest: str
    paths_by_rank: Mapping[int, Path]


class LoadedAdapter(msgspec.Struct, frozen=True):
    """What a key means: an adapter, the slot that it is in or None, and its requests that have not ended.

    Keys of equal adapters share slot and requests.
    """

    key: str
    adapter: Adapter
    slot: int | None
    num_users: int


@dataclass(eq=False, slots=True)
class _Loaded:
    """An adapter that `num_keys` keys mean, or that requests use which have not ended.

    Of its `num_users` requests that have not ended, `num_pins` run.
    """

    digest: str
    paths_by_rank: Mapping[int, Path]
    slot: int | None = None
    num_keys: int = 0
    num_users: int = 0
    num_pins: int = 0
    #: Requests that have started with it, older ones counted less.
    frequency: float = 0.0
    #: Number of the newest request that has started with it, among those of all adapters.
    last_use: int = 0


class AdapterSlots:
    """Adapters by key and digest, and the slots of the ranks."""

    def __init__(self, num_slots: int, policy: AdapterEviction = "lru") -> None:
        """Starts without adapters, and with empty slots. The policy counts uses by new requests."""
        self._policy = policy
        self._keys: dict[str, Adapter] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._slots: list[_Loaded | None] = [None] * num_slots
        # By slot: only the newest order counts.
        self._ordered: dict[int, _Loaded] = {}
        self._num_uses = 0

    @property
    def num_slots(self) -> int:
        """Adapters that the ranks hold at once."""
        return len(self._slots)

    @property
    def num_used_slots(self) -> int:
        """Slots that hold an adapter."""
        return sum(loaded is not None for loaded in self._slots)

    def find(self, key: str) -> Adapter | None:
        """Returns what a key means for new requests; None if nothing."""
        return self._keys.get(key)

    def describe(self, key: str) -> LoadedAdapter | None:
        """Describes what a key means; None if it means nothing."""
        adapter = self._keys.get(key)
        if adapter is None:
            return None
        loaded = self._loaded[adapter.digest]
        return LoadedAdapter(key, adapter, loaded.slot, loaded.num_users)

    def is_loaded(self, digest: str) -> bool:
        """Tells whether an adapter's files are needed: a key means it, or a request that has not ended uses it."""
        return digest in self._loaded

    def load(self, key: str, adapter: Adapter, paths_by_rank: Mapping[int, Path]) -> None:
        """Makes a key mean an adapter, whose files are checked. Slots are written from the files that came last.

        If the key meant another adapter, requests that have come before go on with that.
        """
        assert self._slots, f"{adapter.name} has no slot to go to"
        previous = self._keys.get(key)
        self._keys[key] = adapter
        loaded = self._loaded.setdefault(adapter.digest, _Loaded(adapter.digest, paths_by_rank))
        loaded.paths_by_rank = paths_by_rank
        loaded.num_keys += 1
        if previous is not None:
            self._drop_key(previous)

    def unload(self, key: str) -> None:
        """Takes the meaning from a key, if it has any: no new request finds it, and those that have come go on."""
        previous = self._keys.pop(key, None)
        if previous is not None:
            self._drop_key(previous)

    def join(self, request: Request) -> None:
        """Takes in that a request waits. Its adapter, if it has one, is loaded, and stays so until the request ends."""
        if request.adapter is not None:
            loaded = self._loaded.get(request.adapter.digest)
            assert loaded is not None, f"adapter {request.adapter.name} of {request.request_id} is not loaded"
            loaded.num_users += 1

    def list_startable(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Yields those of the waiting requests that may start, oldest first: there are slots for all of them together.

        A request waits for a slot if those of other adapters pin all. Then no newer request starts with one of these
        adapters, the first that would make room, so that its slot becomes free when those that run have ended. Requests
        with further adapters, and without, overtake freely.
        """
        pinned = [loaded for loaded in self._slots if loaded is not None and loaded.num_pins]
        # What starts with these requests is used last, so it comes behind.
        occupying = [loaded.digest for loaded in sorted(pinned, key=self._rank)]
        held_back: set[str] = set()
        for request in waiting:
            digest = request.adapter_digest
            if digest in held_back:
                continue
            if digest is not None and digest not in occupying:
                if len(occupying) == len(self._slots):
                    held_back.update([digest, *[one for one in occupying if one not in held_back][:1]])
                    continue
                occupying.append(digest)
            yield request

    def lacks_slot(self, request: Request) -> bool:
        """Tells whether a waiting request would need a slot, and requests of other adapters pin all."""
        if request.adapter is None or self._loaded[request.adapter.digest].num_pins:
            return False
        return all(loaded is not None and loaded.num_pins for loaded in self._slots)

    def pin(self, request: Request) -> None:
        """Gives a request that starts, one of `list_startable`, the slot of its adapter until it ends.

        If the adapter is in none, it takes an empty one, or that of the adapter which makes room, and a write is
        ordered.
        """
        if request.adapter is None:
            return
        loaded = self._loaded[request.adapter.digest]
        if loaded.slot is None:
            loaded.slot = self._make_room()
            self._slots[loaded.slot] = self._ordered[loaded.slot] = loaded
        request.adapter_slot = loaded.slot
        loaded.num_pins += 1
        loaded.frequency += 1
        self._num_uses += 1
        loaded.last_use = self._num_uses
        if self._num_uses % DECAY_PERIOD == 0:
            for one in self._loaded.values():
                # Without rounding, which would make equal what is not: see `_rank`.
                one.frequency /= 2

    def leave(self, request: Request) -> None:
        """Takes in that a request has ended, whether it ran or waited."""
        if request.adapter is None:
            return
        loaded = self._loaded[request.adapter.digest]
        loaded.num_users -= 1
        if request.adapter_slot is not None:
            request.adapter_slot = None
            loaded.num_pins -= 1
        self._drop_unused(loaded)

    def take_writes(self) -> list[AdapterWrite]:
        """Returns the orders since the last call. They are due before the next step, while none is in flight."""
        ordered, self._ordered = self._ordered, {}
        return [AdapterWrite(slot, loaded.digest, loaded.paths_by_rank) for slot, loaded in ordered.items()]

    def note_failure(self, write: AdapterWrite) -> None:
        """Takes in that a slot is empty, because its write failed. The requests with that adapter have ended."""
        failed, self._slots[write.slot] = self._slots[write.slot], None
        if failed is not None:
            assert not failed.num_pins, f"{failed.num_pins} requests run with adapter {failed.digest}"
            failed.slot = None

    def reset(self) -> None:
        """Takes in that all slots are empty, because the ranks are others. No request runs."""
        for loaded in self._loaded.values():
            assert not loaded.num_pins, f"{loaded.num_pins} requests run with adapter {loaded.digest}"
            loaded.slot = None
        self._slots = [None] * len(self._slots)
        self._ordered.clear()

    def check_integrity(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Asserts that slots, counts and requests agree, and that no adapter is kept in vain."""
        pins = Counter(request.adapter.digest for request in running if request.adapter is not None)
        users = pins + Counter(request.adapter.digest for request in waiting if request.adapter is not None)
        keys = Counter(adapter.digest for adapter in self._keys.values())
        assert self._loaded.keys() == keys.keys() | users.keys(), f"{[*self._loaded]} are loaded"
        for digest, loaded in self._loaded.items():
            counted = loaded.num_pins, loaded.num_users, loaded.num_keys
            assert counted == (pins[digest], users[digest], keys[digest]), f"adapter {digest} counts {counted}"
            is_there = loaded.slot is not None and self._slots[loaded.slot] is loaded
            assert is_there or (loaded.slot is None and not loaded.num_pins), f"adapter {digest} lost its slot"
        held = [loaded.digest for loaded in self._slots if loaded is not None]
        assert sorted(held) == sorted(one.digest for one in self._loaded.values() if one.slot is not None)
        for request in running:
            slot = None if request.adapter is None else self._loaded[request.adapter.digest].slot
            assert request.adapter_slot == slot, f"{request.request_id} runs with slot {request.adapter_slot}"
        for request in waiting:
            assert request.adapter_slot is None, f"{request.request_id} waits and has a slot"

    def _rank(self, loaded: _Loaded) -> tuple[float, int]:
        """Orders adapters, those first that make room first.

        An adapter that no request starts with goes to the front and stays there, so that those which wait for its slot
        get it.
        """
        return loaded.frequency if self._policy == "lfu" else 0.0, loaded.last_use

    def _make_room(self) -> int:
        if None in self._slots:
            return self._slots.index(None)
        idle = [loaded for loaded in self._slots if loaded is not None and not loaded.num_pins]
        assert idle, "no slot is free for a request that starts"
        evicted = min(idle, key=self._rank)
        slot, evicted.slot = evicted.slot, None
        assert slot is not None
        return slot

    def _drop_key(self, adapter: Adapter) -> None:
        loaded = self._loaded[adapter.digest]
        loaded.num_keys -= 1
        self._drop_unused(loaded)

    def _drop_unused(self, loaded: _Loaded) -> None:
        """Forgets an adapter that no key means and no request uses; its slot is empty then."""
        if loaded.num_users or loaded.num_keys:
            return
        del self._loaded[loaded.digest]
        if loaded.slot is not None:
            self._slots[loaded.slot] = None
            self._ordered.pop(loaded.slot, None)
