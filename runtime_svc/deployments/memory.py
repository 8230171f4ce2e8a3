"""Memory of this runtime: what deployments need, and whether it is there.

Counted are weights, KV caches and the memory that steps are passed in. Weights are pages of the blob itself, which all
ranks that map it share: a blob counts once, however many deployments use it. The ranks' own code and their scratch
memory are not counted; the share of the machine that deployments may not use is for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from bundle.manifest import DTYPE_SIZES_BYTES, Manifest
from execution.ranks.step_memory import StepLayout
from runtime_svc.errors import MemoryUnavailable


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that something needs.

    Attributes:
        private_bytes: Its own.
        blobs: Sizes in bytes, by digest, of blobs that it maps and shares.
    """

    private_bytes: int = 0
    blobs: Mapping[str, int] = field(default_factory=dict)


def state_need(manifest: Manifest) -> MemoryNeed:
    """KV cache and step memory of a bundle, over all ranks."""
    state_bytes = sum(prod(tensor.shape) * DTYPE_SIZES_BYTES[tensor.dtype] for tensor in manifest.state.tensors)
    return MemoryNeed(manifest.tp_degree * state_bytes + StepLayout.of(manifest).size_bytes)


def weights_need(manifest: Manifest) -> MemoryNeed:
    """Weights of a bundle, over all ranks; where they come later, as much as their tensors will take."""
    shards = [shard for weight_set in manifest.weight_sets for shard in weight_set.shards]
    awaited = (tensor for shard in shards if shard.blob is None for tensor in shard.tensors)
    return MemoryNeed(
        sum(prod(tensor.shape) * DTYPE_SIZES_BYTES[tensor.dtype] for tensor in awaited),
        {shard.blob: shard.size_bytes for shard in shards if shard.blob is not None},
    )


class MemoryPool:
    """Memory that deployments may use."""

    def __init__(self, total_bytes: int) -> None:
        """Begins with all of it free."""
        self.total_bytes = total_bytes
        self._private_bytes = 0
        self._sizes: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    @property
    def free_bytes(self) -> int:
        """Memory that nothing is reserved in."""
        return self.total_bytes - self._private_bytes - sum(self._sizes.values())

    def reserve(self, *needs: MemoryNeed) -> None:
        """Takes what all the needs take together.

        Raises:
            MemoryUnavailable: It is more than is free; nothing was taken.
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
        """Gives back what was reserved."""
        for need in needs:
            self._private_bytes -= need.private_bytes
            self._users.subtract(need.blobs.keys())
            for digest in need.blobs:
                assert self._users[digest] >= 0, f"{digest} is not held"
                if not self._users[digest]:
                    del self._users[digest], self._sizes[digest]
