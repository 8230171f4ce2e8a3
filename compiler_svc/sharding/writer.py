"""Writes the weight shards of ranks, each as a safetensors file.

Ranks map shards into memory and use them in place, so every tensor starts at a multiple of 64 bytes. The format allows
no gaps: tensors that end off such a multiple come last, each followed by a tensor of padding.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Protocol, Self

import torch
from torch import Tensor

from bundle.abi.tensor import DType
from compiler_svc.models.layers.alibi import compute_slopes
from compiler_svc.models.layers.rope import compute_frequencies
from compiler_svc.models.parameters import ParameterSpec
from compiler_svc.models.sources import RankSource, RopeSource, SlopeSource
from compiler_svc.sharding.parts import Block, JoinedTensor, copy_block, list_blocks
from compiler_svc.sharding.plan import PlannedTensor, WeightPlan
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tensors import TensorReader
from execution.dtypes import TORCH_DTYPES

ALIGNMENT_BYTES: Final = 64
#: The names of padding tensors are this and a number; no executable uses them.
PADDING_PREFIX: Final = "padding."
#: Tensors are cast and written in blocks of at most this size.
CHUNK_SIZE_BYTES: Final = 16 << 20

_DTYPES: Final[Mapping[DType, str]] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}


class ByteSink(Protocol):
    """A destination for a shard: an open binary file, or a hashing `bundle.blob_writer.BlobWriter`."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Appends bytes."""
        ...


def write_shards(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    sinks: Mapping[int, ByteSink],
    *,
    num_threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Streams the shards of several ranks in one pass over the checkpoint. Equal inputs give equal bytes.

    Ranks go through the tensors side by side, so that what one of them reads of the checkpoint is still in the page
    cache when the others need it. However large checkpoint and shards are, memory use stays at a chunk for each thread,
    and at `MAX_MAPPED_BYTES` and a chunk for each rank of mapped files; or at the largest tensor that is transposed.

    Args:
        sinks: Where each rank's shard goes. A thread writes to one of them at a time.
        num_threads: Threads that cut and write, at most.
        progress: Called with the number of bytes written since the previous call; may raise to stop writing.

    Returns:
        Size of each file in bytes.

    Raises:
        CheckpointInvalid: The checkpoint has changed since it was opened.
    """
    ordered = sorted(plan.tensors, key=lambda tensor: tensor.rank_size_bytes % ALIGNMENT_BYTES != 0)
    with TensorReader(checkpoint) as reader, _Team(sinks, num_threads) as team:
        report = progress or (lambda _size_bytes: None)
        report(team.write(_render_header(ordered)))
        for tensor in ordered:
            for block in list_blocks(tensor.rank_shape, _count_items(tensor)):
                report(_write_block(tensor, block, reader, team))
                reader.trim()
            report(team.write(bytes(_padding_bytes(tensor.rank_size_bytes))))
    return team.written_bytes


class _Team:
    """Threads that share the ranks of one pass. A context manager that ends the threads.

    Attributes:
        ranks: In no particular order.
        written_bytes: Of each shard.
    """

    def __init__(self, sinks: Mapping[int, ByteSink], num_threads: int) -> None:
        num_threads = min(num_threads, len(sinks))
        ranks = sorted(sinks)
        self.ranks = ranks
        self.written_bytes = 0
        self._sinks = sinks
        # All casts of a thread share one buffer, because one buffer for each would fragment the heap.
        self._shares = [
            (ranks[number::num_threads], torch.empty(CHUNK_SIZE_BYTES, dtype=torch.uint8))
            for number in range(num_threads)
        ]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="shard")

    def run(self, cut: Callable[[int, Tensor], memoryview]) -> int:
        """Cuts and writes the next bytes of every shard; returns their number, of all shards together.

        Args:
            cut: Takes a rank and a buffer; returns the rank's bytes, which are as many for each rank.
        """

        def work(share: tuple[list[int], Tensor]) -> list[int]:
            ranks, staging = share
            return [self._sinks[rank].write(cut(rank, staging)) for rank in ranks]

        counts = [count for counts in self._threads.map(work, self._shares) for count in counts]
        self.written_bytes += counts[0]
        return sum(counts)

    def write(self, data: bytes) -> int:
        """Writes the same bytes to every shard; returns their number, of all shards together."""
        for sink in self._sinks.values():
            sink.write(data)
        self.written_bytes += len(data)
        return len(data) * len(self._sinks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)


def _write_block(tensor: PlannedTensor, block: Block, reader: TensorReader, team: _Team) -> int:
    """Writes the same block of every rank's part of a tensor."""
    axis, dtype = tensor.spec.divided_axis(), TORCH_DTYPES[tensor.dtype]
    runs = {rank: () if axis is None else tensor.spec.axes[axis].divide(tensor.tp_degree)[rank] for rank in team.ranks}
    wholes = {rank: _find_values(tensor.spec, reader, rank) for rank in team.ranks}
    lengths = [stop - start for start, stop in block]
    size_bytes = math.prod(lengths) * dtype.itemsize

    def cut(rank: int, staging: Tensor) -> memoryview:
        data = staging[:size_bytes]
        copy_block(wholes[rank], axis, runs[rank], block, data.view(dtype).view(lengths))
        return data.numpy().data

    return team.run(cut)


def _find_values(spec: ParameterSpec, reader: TensorReader, rank: int) -> JoinedTensor:
    """Finds the whole tensor: computes it, or reads it from the checkpoint."""
    source = spec.source
    if isinstance(source, RopeSource):
        return JoinedTensor([compute_frequencies(source)])
    if isinstance(source, SlopeSource):
        return JoinedTensor([compute_slopes(source)])
    if isinstance(source, RankSource):
        return JoinedTensor([torch.tensor([rank], dtype=torch.int32)])
    tensors = {name: reader.read(name) for name in dict.fromkeys(one.tensor for one in source.slices)}
    if source.is_transposed:
        tensors = {name: tensor.t() for name, tensor in tensors.items()}
    slices = [tensors[one.tensor].narrow(source.axis, one.start, one.length) for one in source.slices]
    return JoinedTensor(slices, source.axis)


def _render_header(ordered: list[PlannedTensor]) -> bytes:
    entries: dict[str, object] = {}
    offset = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], size_bytes: int) -> None:
        nonlocal offset
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + size_bytes)}
        offset += size_bytes

    for tensor in ordered:
        add(tensor.name, _DTYPES[tensor.dtype], tensor.rank_shape, tensor.rank_size_bytes)
        if padding := _padding_bytes(offset):
            add(f"{PADDING_PREFIX}{len(entries)}", "U8", (padding,), padding)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * _padding_bytes(8 + len(text))
    return struct.pack("<Q", len(text)) + text


def _count_items(tensor: PlannedTensor) -> int:
    """Number of items of a block: of a chunk's size, as the checkpoint has them if its neighbours are other ranks'."""
    items = CHUNK_SIZE_BYTES // TORCH_DTYPES[tensor.dtype].itemsize
    # Behind the first axis, the ranks' parts lie side by side, and reading one of them takes the others' pages, too.
    is_first = not tensor.spec.divided_axis()
    return items if is_first else max(1, items // tensor.tp_degree)


def _padding_bytes(offset: int) -> int:
    """Number of bytes from an offset to the next aligned offset."""
    return -offset % ALIGNMENT_BYTES
