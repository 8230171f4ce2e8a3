"""Writes the weight shards of ranks, and the files of checkpoints, each as a safetensors file.

Ranks map shards into memory and use them in place, so every tensor starts at a multiple of 64 bytes. The format allows
no gaps: tensors that end off such a multiple come last, each followed by a tensor of padding.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Final, Protocol

import torch
from torch import Tensor

from bundle.abi.tensor import DTYPES
from compiler_svc.sharding.parts import Block, Values, copy_block, list_blocks
from compiler_svc.sharding.plan import PlannedTensor, WeightPlan
from compiler_svc.sharding.values import Reader, SourceReader
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tensors import TensorReader
from execution.dtypes import TORCH_DTYPES

ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FileForm:
    """What files have beside tensors: the distance of places where these may begin, and the header's metadata."""

    alignment_bytes: int
    metadata: Mapping[str, str]


#: Of ranks.
SHARD: Final = FileForm(alignment_bytes=ALIGNMENT_BYTES, metadata={})
#: Of Hugging Face checkpoints: their readers take each tensor to be one of the model. transformers asks for `pt`.
CHECKPOINT_FILE: Final = FileForm(alignment_bytes=1, metadata={"format": "pt"})
#: The names of padding tensors are this and a number; no executable uses them.
PADDING_PREFIX: Final = "padding."
#: Tensors are cast and written in blocks of at most this size.
CHUNK_SIZE_BYTES: Final = 8 << 20


class ByteSink(Protocol):
    """A destination for a shard: an open binary file, or a hashing `bundle.store.blob_writer.BlobWriter`."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Appends bytes."""
        ...


def write_shards(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    sinks: Mapping[int, ByteSink],
    *,
    form: FileForm = SHARD,
    num_threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Streams the shards of several ranks in one pass over the checkpoint. Equal inputs give equal bytes.

    Ranks go through the tensors side by side, so that what one of them reads of the checkpoint is still in the page
    cache when the others need it. However large checkpoint and shards are, memory use stays at two chunks for each
    rank, and at `MAX_MAPPED_BYTES` and a chunk for each rank of mapped files; or at the largest tensor that is
    transposed.

    At most `num_threads` threads write, one at a time to each sink, and as many read meanwhile. `progress` is called
    with the number of bytes written since the previous call; it may raise to stop writing. Returns the size of each
    file in bytes.
    """
    with TensorReader(checkpoint) as reader:
        return write_tensors(plan, reader, sinks, form=form, num_threads=num_threads, progress=progress)


def write_tensors(
    plan: WeightPlan,
    reader: Reader,
    sinks: Mapping[int, ByteSink],
    *,
    form: FileForm,
    num_threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Streams what a reader reads into the files of several ranks, as `write_shards` does."""
    size_bytes = 0
    writing: list[Future[int]] = []

    def finish_writing() -> None:
        nonlocal size_bytes
        counts = [future.result() for future in writing]
        size_bytes += counts[0] if counts else 0
        if progress is not None:
            progress(sum(counts))

    with _start_threads(2 * num_threads) as threads:
        for parts in _render_shards(plan, reader, list(sinks), threads, form):
            finish_writing()
            writing = [threads.submit(sink.write, data) for sink, data in zip(sinks.values(), parts, strict=True)]
        finish_writing()
    return size_bytes


@contextmanager
def _start_threads(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads in which torch does not start threads of its own."""
    num_torch_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, "shard", initializer=partial(torch.set_num_threads, 1)) as threads:
        try:
            yield threads
        finally:
            threads.shutdown(cancel_futures=True)
            # The number is partly that of the process.
            torch.set_num_threads(num_torch_threads)


def _render_shards(
    plan: WeightPlan, reader: Reader, ranks: Sequence[int], threads: ThreadPoolExecutor, form: FileForm
) -> Iterator[Sequence[bytes | memoryview]]:
    """Yields the next bytes of each rank's shard. They are valid until the next but one."""
    ordered = sorted(plan.tensors, key=lambda tensor: _pad(tensor.rank_size_bytes, form) != 0)
    yield [_render_header(ordered, form)] * len(ranks)
    # All casts share these buffers, because new ones would fragment the heap. The caller still writes one half of them
    # while the other half is filled.
    halves = cycle([[torch.empty(CHUNK_SIZE_BYTES, dtype=torch.uint8) for _ in ranks] for _ in range(2)])
    sources = SourceReader(reader)
    for tensor in ordered:
        for block in list_blocks(tensor.rank_shape, _count_items(tensor)):
            values = [sources.open(tensor.spec.source, rank) for rank in ranks]
            yield list(threads.map(partial(_render_block, tensor, block), ranks, values, next(halves)))
            del values
            reader.trim()
        yield [bytes(_pad(tensor.rank_size_bytes, form))] * len(ranks)


def _render_block(tensor: PlannedTensor, block: Block, rank: int, whole: Values, staging: Tensor) -> memoryview:
    """Cuts and casts a block of a rank's part of a tensor; the result is in `staging`."""
    axis, dtype = tensor.spec.divided_axis(), TORCH_DTYPES[tensor.dtype]
    runs = () if axis is None else tensor.spec.axes[axis].divide(tensor.tp_degree)[rank]
    lengths = [stop - start for start, stop in block]
    data = staging[: math.prod(lengths) * dtype.itemsize]
    copy_block(whole, axis, runs, block, data.view(dtype).view(lengths))
    return data.numpy().data


def _render_header(ordered: list[PlannedTensor], form: FileForm) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(form.metadata)} if form.metadata else {}
    offset = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], size_bytes: int) -> None:
        nonlocal offset
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + size_bytes)}
        offset += size_bytes

    for tensor in ordered:
        add(tensor.name, DTYPES[tensor.dtype].safetensors, tensor.rank_shape, tensor.rank_size_bytes)
        if padding := _pad(offset, form):
            add(f"{PADDING_PREFIX}{len(entries)}", "U8", (padding,), padding)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def _count_items(tensor: PlannedTensor) -> int:
    """Number of items of a block: of a chunk's size, as the checkpoint has them if its neighbours are other ranks'."""
    size_bytes = DTYPES[tensor.dtype].size_bytes
    # Bytes are quantized values, which are float32 before.
    items = CHUNK_SIZE_BYTES // (4 if size_bytes == 1 else size_bytes)
    # Behind the first axis, the ranks' parts lie side by side, and reading one of them takes the others' pages, too.
    is_first = not tensor.spec.divided_axis()
    return items if is_first else max(1, items // tensor.tp_degree)


def _pad(offset: int, form: FileForm) -> int:
    """Number of bytes from an offset to the next where a tensor may begin."""
    return -offset % form.alignment_bytes
