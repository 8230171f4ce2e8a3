"""Writes the weight shard of one rank as a safetensors file.

Ranks map shards into memory and use them in place, so every tensor starts at a multiple of 64 bytes. The format allows
no gaps: tensors that end off such a multiple come last, each followed by a tensor of padding.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from bundle.abi.tensor import DType
from compiler_svc.models.layers.alibi import compute_slopes
from compiler_svc.models.layers.rope import compute_frequencies
from compiler_svc.models.parameters import ParameterSpec
from compiler_svc.models.sources import RankSource, RopeSource, SlopeSource
from compiler_svc.sharding.parts import JoinedTensor, copy_block, list_blocks
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


def write_shard(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    rank: int,
    sink: ByteSink,
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Streams one rank's shard. Equal inputs give equal bytes. Memory use stays at a few chunks.

    Args:
        progress: Called with the number of bytes written since the previous call; may raise to stop writing.

    Returns:
        Size of the file in bytes.

    Raises:
        CheckpointInvalid: The checkpoint has changed since it was opened.
    """
    size_bytes = 0
    with TensorReader(checkpoint) as reader:
        for data in _render_shard(plan, reader, rank):
            size_bytes += sink.write(data)
            if progress is not None:
                progress(len(data))
    return size_bytes


def _render_shard(plan: WeightPlan, reader: TensorReader, rank: int) -> Iterator[bytes | memoryview]:
    ordered = sorted(plan.tensors, key=lambda tensor: tensor.rank_size_bytes % ALIGNMENT_BYTES != 0)
    yield _render_header(ordered)
    # All casts share one buffer, because one buffer for each would fragment the heap.
    staging = torch.empty(CHUNK_SIZE_BYTES, dtype=torch.uint8)
    for tensor in ordered:
        yield from _render_part(tensor, _find_values(tensor.spec, reader, rank), rank, staging)
        yield bytes(_padding_bytes(tensor.rank_size_bytes))


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


def _render_part(tensor: PlannedTensor, whole: JoinedTensor, rank: int, staging: Tensor) -> Iterator[memoryview]:
    """Cuts and casts a tensor, one block at a time. Each result is valid until the next one."""
    shape, dtype = tensor.rank_shape, TORCH_DTYPES[tensor.dtype]
    axis = tensor.spec.divided_axis()
    runs = () if axis is None else tensor.spec.axes[axis].divide(tensor.tp_degree)[rank]
    for block in list_blocks(shape, len(staging) // dtype.itemsize):
        lengths = [stop - start for start, stop in block]
        data = staging[: math.prod(lengths) * dtype.itemsize]
        copy_block(whole, axis, runs, block, data.view(dtype).view(lengths))
        yield data.numpy().data


def _padding_bytes(offset: int) -> int:
    """Number of bytes from an offset to the next aligned offset."""
    return -offset % ALIGNMENT_BYTES
