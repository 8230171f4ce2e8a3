"""Counts the memory that deployments need and hold.

It counts weights, KV caches and the shared memory that carries steps. Ranks map the weight blob itself and share its
pages, so a blob counts once, however many deployments use it. It does not count code and scratch memory of the ranks;
the share of the machine that `Settings.memory_bytes` leaves out is for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from bundle.abi.state import StateTensor
from bundle.manifest import DTYPE_SIZES_BYTES, Manifest, WeightTensor
from execution.ranks.step_memory import StepLayout
from runtime_svc.errors import MemoryUnavailable


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a part of a deployment needs.

    Attributes:
        private_bytes: Memory that it shares with no other deployment.
        blobs: Sizes in bytes of the blobs that it maps, by digest; deployments share them.
    """

    private_bytes: int = 0
    blobs: Mapping[str, int] = field(default_factory=dict)


def state_need(manifest: Manifest) -> MemoryNeed:
    """Returns the need of a bundle's KV cache and step memory, over all ranks."""
    return MemoryNeed(manifest.tp_degree * count_state_bytes(manifest) + StepLayout.of(manifest).size_bytes)


def step_need(manifest: Manifest) -> MemoryNeed:
    """Returns the need of a bundle's step memory, all that ranks with memory of their own need of the host's."""
    return MemoryNeed(StepLayout.of(manifest).size_bytes)


def count_state_bytes(manifest: Manifest) -> int:
    """Counts the bytes of one rank's KV cache."""
    return sum(map(count_bytes, manifest.state.tensors))


def count_bytes(tensor: StateTensor | WeightTensor) -> int:
    """Counts the bytes of a tensor."""
    return prod(tensor.shape) * DTYPE_SIZES_BYTES[tensor.dtype]


def weights_need(manifest: Manifest) -> MemoryNeed:
    """Returns the need of a bundle's weights, over all ranks; while they are awaited, by tensor sizes."""
    shards = [shard for weight_set in manifest.weight_sets for shard in weight_set.shards]
    awaited = (tensor for shard in shards if shard.blob is None for tensor in shard.tensors)
    return MemoryNeed(
        sum(map(count_bytes, awaited)),
        {shard.blob: shard.size_bytes for shard in shards if shard.blob is not None},
    )


class MemoryPool:
    """The memory that deployments may use."""

    def __init__(self, total_bytes: int) -> None:
        """Starts with all `total_bytes` free."""
        self.total_bytes = total_bytes
        self._private_bytes = 0
        self._sizes: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    @property
    def free_bytes(self) -> int:
        """The memory that is not reserved, in bytes."""
        return self.total_bytes - self._private_bytes - sum(self._sizes.values())

    def reserve(self, *needs: MemoryNeed) -> None:
        """Reserves memory for all the needs together.

        Raises:
            MemoryUnavailable: The needs exceed the free memory; nothing is reserved then.
        """
        new = {digest: size for need in needs for digest, size in need.blobs.items() if digest not in self._sizes}
        private_bytes = sum(need.private_bytes for need in needs)
        needed_bytes = private_bytes + sum(new.values())
        if needed_bytes > self.free_bytes:
            raise MemoryUnavailable(needed_bytes, self.free_bytes, self.total_bytes)
        self._private_bytes += private_bytes
        self._sizes |= new
        for need in needs:
            self._users.update(need.blobs.keys())

    def release(self, *needs: MemoryNeed) -> None:
        """Gives back reserved memory."""
        for need in needs:
            self._private_bytes -= need.private_bytes
            self._users.subtract(need.blobs.keys())
            for digest in need.blobs:
                assert self._users[digest] >= 0, f"{digest} is not held"
                if not self._users[digest]:
                    del self._users[digest], self._sizes[digest]
