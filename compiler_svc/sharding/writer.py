"""Writes the weight shard of one rank as a safetensors file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.weights.checkpoint import Checkpoint


class ByteSink(Protocol):
    """Where a shard goes: an open binary file, or a `bundle.blob_writer.BlobWriter`, which hashes on the way."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Appends bytes."""
        ...


def write_shard(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    rank: int,
    sink: ByteSink,
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Streams one rank's shard, one tensor in memory at a time. Equal inputs give equal bytes.

    Args:
        progress: Called with the number of bytes written since the previous call.

    Returns:
        Size of the file in bytes.

    Raises:
        CheckpointInvalid: The checkpoint changed since it was opened.
    """
    raise NotImplementedError
