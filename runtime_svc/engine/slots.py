"""KV slots: rows of the contiguous KV cache."""

from __future__ import annotations

import heapq


class SlotPool:
    """Hands out slots 0 to `num_slots - 1`, lowest first, so that a small load stays in the first rows."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that somebody holds."""
        return len(self._used)

    def allocate(self) -> int:
        """Takes the lowest free slot; there must be one."""
        assert self._free, "no slot is free"
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Gives back a slot that is held."""
        assert slot in self._used, f"slot {slot} is not held"
        self._used.remove(slot)
        heapq.heappush(self._free, slot)

    def check_integrity(self, held: set[int]) -> None:
        """Asserts that every slot is either free or in `held`, once."""
        assert self._used == held, f"slots {self._used} are taken, requests hold {held}"
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        assert set(self._free) | held == set(range(self.num_slots)), "a slot was lost"
        assert not set(self._free) & held, "a slot is free and held"
