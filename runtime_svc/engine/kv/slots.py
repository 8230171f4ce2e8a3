"""The contiguous KV cache: one slot a sequence, with room for the longest."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from runtime_svc.engine.kv.kept_sequences import SessionKeeper, choose_evicted
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request, Session


class SlotManager:
    """Hands out slots 0 to `num_slots - 1`, lowest first, so that a small load stays in the first rows.

    A session keeps the slot of its last request. It loses the slot when no other one is free.
    """

    def __init__(self, num_slots: int, slot_tokens: int, keeper: SessionKeeper | None = None) -> None:
        self._keeper = keeper or SessionKeeper()
        self.block_tokens = slot_tokens
        # A slot has one owner.
        self.caches_prefixes = False
        self.num_evictions = 0
        self._slots = tuple(Placement((slot,)) for slot in range(num_slots))
        self._free = list(range(num_slots))
        self._held: dict[Request, Placement] = {}
        # Those unused for longest come first.
        self._kept: dict[Session, Placement] = {}
        # Requests that hold what was computed before a reset.
        self._stale: set[Request] = set()

    @property
    def num_blocks(self) -> int:
        """All slots."""
        return len(self._slots)

    @property
    def num_used_blocks(self) -> int:
        """Slots that requests hold."""
        return len(self._held)

    def find_prefix(self, request: Request) -> int:
        """Counts the tokens that the slot of a request's session holds: a slot has one owner."""
        return 0 if request.session is None or request in self._held else self._keeper.count(request)

    def will_find_more(self, request: Request, num_cached: int, other: Request) -> bool:  # noqa: ARG002
        """Tells that it does not: a slot has one owner."""
        return False

    def reserve(self, request: Request, num_tokens: int, *, num_cached: int = 0) -> Placement | None:  # noqa: ARG002
        """Returns the slot of a request, which has room for all its tokens; None if other requests hold every slot."""
        placement = self._held.get(request)
        if placement is None:
            slot = self._take(request.session)
            if slot is not None:
                placement = self._held[request] = self._slots[slot]
        return placement

    def commit(self, request: Request) -> None:
        """Has no effect: a slot has one owner."""

    def release(self, request: Request) -> int:
        """Frees the slot of a request, if it has one; returns how many it had."""
        placement = self._held.pop(request, None)
        if placement is None:
            return 0
        self._stale.discard(request)
        heapq.heappush(self._free, placement.blocks[0])
        return 1

    def keep(self, request: Request) -> int:
        """Leaves the slot of a request to its session, unless it holds what was computed before a reset."""
        session = None if request in self._stale or request not in self._held else self._keeper.note(request)
        if session is None:
            return self.release(request)
        self._kept[session] = self._held.pop(request)
        return 1

    def forget(self, session: Session) -> None:
        """Frees the slot that a session keeps."""
        self.erase(session)

    def erase(self, session: Session) -> list[int]:
        """Frees the slot that a session keeps; returns it."""
        placement = self._kept.pop(session, None)
        if placement is None:
            return []
        session.token_ids = []
        heapq.heappush(self._free, placement.blocks[0])
        return [*placement.blocks]

    def reset(self) -> list[int]:
        """Frees the slots that sessions keep, and returns them.

        Others stay as they are: a request never reads values that another one left in its slot.
        """
        self._keeper.num_resets += 1
        self._stale.update(self._held)
        return [slot for session in list(self._kept) for slot in self.erase(session)]

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Asserts that every slot is free or held once, by one of `requests` or by a session between its requests."""
        for request in self._held:
            assert request in requests, f"{request.request_id} holds a slot and does not run"
            assert request.session not in self._kept, f"{request.request_id} left a slot to its session"
        for request in requests:
            assert request in self._held or not request.num_computed_tokens, f"{request.request_id} lost its slot"
        for session in self._kept:
            num_tokens = len(session.token_ids)
            assert 0 < num_tokens <= self.block_tokens, f"{session.session_id} keeps a slot for {num_tokens} tokens"
        placements = [*self._held.values(), *self._kept.values()]
        slots = sorted(self._free + [placement.blocks[0] for placement in placements])
        assert slots == list(range(len(self._slots))), f"free and held slots are {slots}"

    def _take(self, session: Session | None) -> int | None:
        """Takes the slot that a session keeps, a free one, or that of the session unused for longest."""
        own = None if session is None else self._kept.pop(session, None)
        if session is not None and own is not None:
            session.token_ids = []
            return own.blocks[0]
        if not self._free and self._kept:
            self.num_evictions += 1
            self.forget(choose_evicted(self._kept))
        return heapq.heappop(self._free) if self._free else None
