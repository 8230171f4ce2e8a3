"""Counts the memory that deployments need and hold.

It counts weights, KV caches and the shared memory that carries steps. Ranks map the weight blob itself and share its
pages, so a blob counts once, however many deployments use it. It does not count code and scratch memory of the ranks;
the share of the machine that `Settings.memory_bytes` leaves out is for them.

Of the memory of cores, which have their own on Neuron targets, it counts the KV cache and weights, staged ones beside
those in use. Executables need more, which only their compiler knows: the executor refuses what does not fit then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from bundle.abi.formats import measure_kept
from bundle.abi.state import StateTensor
from bundle.abi.tensor import DTYPES
from bundle.manifest import Manifest, WeightShard, WeightTensor
from execution.ranks.step_memory import StepLayout
from runtime_svc.errors import MemoryUnavailable


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a part of a deployment needs for itself, and the bytes of shared blobs by their digest."""

    private_bytes: int = 0
    blobs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights of a bundle that ranks keep mapped beside those in use, and the memory that is reserved for them.

    Attributes:
        ref: The reference that named the bundle.
        version: The version, `NAME:vN`, that this was; empty if its source told none.
    """

    ref: str
    digest: str
    version: str
    need: MemoryNeed


def state_need(manifest: Manifest) -> MemoryNeed:
    """Returns the need of a bundle's KV cache, mutable weight sets and step memory, over all ranks."""
    mutable_bytes = _count_weights(manifest.shards(mutable=True)).total()
    return MemoryNeed(
        manifest.tp_degree * count_state_bytes(manifest) + mutable_bytes + StepLayout.of(manifest).size_bytes
    )


def step_need(manifest: Manifest) -> MemoryNeed:
    """Returns the need of a bundle's step memory, all that ranks with memory of their own need of the host's."""
    return MemoryNeed(StepLayout.of(manifest).size_bytes)


def count_state_bytes(manifest: Manifest) -> int:
    """Counts the bytes of one rank's KV cache."""
    return sum(map(count_bytes, manifest.state.tensors))


def measure_kept_weights(manifest: Manifest) -> Counter[str]:
    """Measures the weights of all ranks in bytes, by the format or dtype in which they are kept."""
    kept = Counter[str]()
    for shard in manifest.shards():
        kept += measure_kept((one.name, one.dtype, one.shape) for one in shard.tensors)
    return kept


def measure_kept_state(manifest: Manifest) -> Counter[str]:
    """Measures the KV cache of all ranks in bytes, by dtype."""
    kept = Counter[str]()
    for tensor in manifest.state.tensors:
        kept[tensor.dtype] += manifest.tp_degree * count_bytes(tensor)
    return kept


def count_bytes(tensor: StateTensor | WeightTensor) -> int:
    """Counts the bytes of a tensor."""
    return prod(tensor.shape) * DTYPES[tensor.dtype].size_bytes


def weights_need(manifest: Manifest) -> MemoryNeed:
    """Returns the need of a bundle's weights, over all ranks; while they are awaited, by tensor sizes.

    Mutable weight sets stay when weights are replaced, so they are of the need of state.
    """
    shards = list(manifest.shards())
    awaited = (tensor for shard in shards if shard.blob is None for tensor in shard.tensors)
    return MemoryNeed(
        sum(map(count_bytes, awaited)),
        {shard.blob: shard.size_bytes for shard in shards if shard.blob is not None},
    )


class MemoryPool:
    """The memory that deployments may use."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._private_bytes = 0
        self._sizes: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    @property
    def free_bytes(self) -> int:
        """The memory that is not reserved, in bytes."""
        return self.total_bytes - self._private_bytes - sum(self._sizes.values())

    def reserve(self, *needs: MemoryNeed) -> None:
        """Reserves memory for all the needs together."""
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


class CoreMemory:
    """The memory of a deployment's cores, `total_bytes` for each of the ranks. No other deployment takes of it."""

    def __init__(self, total_bytes: int, manifest: Manifest, weights: Manifest) -> None:
        self.total_bytes = total_bytes
        self._num_ranks = manifest.tp_degree
        self._state_bytes = count_state_bytes(manifest)
        self._mutable_bytes = _count_weights(manifest.shards(mutable=True))
        self._weights_bytes = _count_weights(weights.shards())
        self._staged_bytes = Counter[int]()
        needed_bytes = max(self.list_used())
        if needed_bytes > total_bytes:
            raise MemoryUnavailable(needed_bytes, total_bytes, total_bytes, where="a core")

    def list_used(self) -> list[int]:
        """Lists the bytes that are reserved of each core, by rank."""
        return [
            self._state_bytes + self._mutable_bytes[rank] + self._weights_bytes[rank] + self._staged_bytes[rank]
            for rank in range(self._num_ranks)
        ]

    def stage(self, weights: Manifest) -> None:
        """Reserves memory for weights beside those in use, until `unstage`: then one set of weights is left, and both
        are of one size, because they fit the same executables.
        """
        staged_bytes = _count_weights(weights.shards())
        free_bytes = [self.total_bytes - used_bytes for used_bytes in self.list_used()]
        shortest = min(range(self._num_ranks), key=lambda rank: free_bytes[rank] - staged_bytes[rank])
        if staged_bytes[shortest] > free_bytes[shortest]:
            needed_bytes, free = staged_bytes[shortest], free_bytes[shortest]
            raise MemoryUnavailable(needed_bytes, free, self.total_bytes, where="a core")
        self._staged_bytes = staged_bytes

    def unstage(self) -> None:
        """Gives back the memory of the weights that are not in use."""
        self._staged_bytes = Counter()


def _count_weights(shards: Iterable[WeightShard]) -> Counter[int]:
    """Counts the bytes of weights, by rank."""
    by_rank = Counter[int]()
    for shard in shards:
        by_rank[shard.rank] += sum(map(count_bytes, shard.tensors))
    return by_rank
