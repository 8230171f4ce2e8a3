"""Counts the memory of the cores that one deployment holds. No other deployment takes of it.

It counts the KV cache and weights, staged ones beside those in use. Executables need more, which only their compiler
knows: the executor refuses what does not fit then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from bundle.manifest import Manifest
from runtime_svc.deployments.memory import count_bytes, count_state_bytes
from runtime_svc.errors import MemoryUnavailable


class CoreMemory:
    """The memory of a deployment's cores, one for each rank.

    Attributes:
        total_bytes: Memory of one logical core.
    """

    def __init__(self, total_bytes: int, manifest: Manifest, weights: Manifest) -> None:
        """Reserves memory for the KV cache of a bundle and for weights, also while these are awaited.

        Args:
            total_bytes: Memory of one logical core.
            manifest: The bundle whose executables run.
            weights: The bundle whose weights they use.

        Raises:
            MemoryUnavailable: A core has too little.
        """
        self.total_bytes = total_bytes
        self._num_ranks = manifest.tp_degree
        self._state_bytes = count_state_bytes(manifest)
        self._weights_bytes = _count_weights(weights)
        self._staged_bytes = Counter[int]()
        needed_bytes = max(self.list_used())
        if needed_bytes > total_bytes:
            raise MemoryUnavailable(needed_bytes, total_bytes, total_bytes, where="a core")

    def list_used(self) -> list[int]:
        """Lists the bytes that are reserved of each core, by rank."""
        return [
            self._state_bytes + self._weights_bytes[rank] + self._staged_bytes[rank] for rank in range(self._num_ranks)
        ]

    @contextmanager
    def staging(self, weights: Manifest) -> Iterator[None]:
        """Reserves memory for weights beside those in use, until the block ends: then one set of weights is left, and
        both are of one size, because they fit the same executables.

        Raises:
            MemoryUnavailable: A core has too little. Nothing is reserved then.
        """
        staged_bytes = _count_weights(weights)
        free_bytes = [self.total_bytes - used_bytes for used_bytes in self.list_used()]
        shortest = min(range(self._num_ranks), key=lambda rank: free_bytes[rank] - staged_bytes[rank])
        if staged_bytes[shortest] > free_bytes[shortest]:
            needed_bytes, free = staged_bytes[shortest], free_bytes[shortest]
            raise MemoryUnavailable(needed_bytes, free, self.total_bytes, where="a core")
        self._staged_bytes = staged_bytes
        try:
            yield
        finally:
            self._staged_bytes = Counter()


def _count_weights(manifest: Manifest) -> Counter[int]:
    """Counts the bytes of weights, by rank."""
    by_rank = Counter[int]()
    for shard in manifest.shards():
        by_rank[shard.rank] += sum(map(count_bytes, shard.tensors))
    return by_rank
