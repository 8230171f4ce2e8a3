"""The contiguous KV cache: one slot a sequence, with room for the longest."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request


class SlotManager:
    """Hands out slots 0 to `num_slots - 1`, lowest first, so that a small load stays in the first rows."""

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        """Starts with every slot free; each has room for `slot_tokens` tokens."""
        self.block_tokens = slot_tokens
        self._slots = tuple(Placement((slot,)) for slot in range(num_slots))
        self._free = list(range(num_slots))
        self._held: dict[Request, Placement] = {}

    @property
    def num_blocks(self) -> int:
        """All slots."""
        return len(self._slots)

    @property
    def num_used_blocks(self) -> int:
        """Slots that requests hold."""
        return len(self._held)

    def find_prefix(self, request: Request) -> int:  # noqa: ARG002
        """Finds no token: a slot has one owner."""
        return 0

    def will_find_more(self, request: Request, num_cached: int, other: Request) -> bool:  # noqa: ARG002
        """Tells that it does not: a slot has one owner."""
        return False

    def reserve(self, request: Request, num_tokens: int, *, num_cached: int = 0) -> Placement | None:  # noqa: ARG002
        """Returns the slot of a request, which has room for all its tokens; None if other requests hold every slot."""
        placement = self._held.get(request)
        if placement is None and self._free:
            placement = self._held[request] = self._slots[heapq.heappop(self._free)]
        return placement

    def commit(self, request: Request) -> None:
        """Has no effect: a slot has one owner."""

    def release(self, request: Request) -> int:
        """Frees the slot of a request, if it has one; returns how many it had."""
        placement = self._held.pop(request, None)
        if placement is None:
            return 0
        heapq.heappush(self._free, placement.blocks[0])
        return 1

    def reset(self) -> list[int]:
        """Keeps all slots as they are: a request never reads values that another one left in its slot."""
        return []

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Asserts that every slot is either free or held once, by one of `requests`."""
        for request in self._held:
            assert request in requests, f"{request.request_id} holds a slot and does not run"
        for request in requests:
            assert request in self._held or not request.num_computed_tokens, f"{request.request_id} lost its slot"
        slots = sorted(self._free + [placement.blocks[0] for placement in self._held.values()])
        assert slots == list(range(len(self._slots))), f"free and held slots are {slots}"
