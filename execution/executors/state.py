"""The state of one rank on the host, and other tensors of zeros: in huge pages, where the host gives them."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from bundle.abi.state import StateLayout
from bundle.abi.tensor import DTYPES, DType
from execution.dtypes import TORCH_DTYPES
from execution.errors import SlotUnknown

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20
#: Which memory the kernel gives huge pages to; the choice stands in brackets.
_KERNELS_CHOICE: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Tensors begin with a line of the processor's caches.
_ALIGNMENT_BYTES: Final = 64


class TensorSpec(Protocol):
    """What says how a tensor is made: of the KV cache, or of weights."""

    @property
    def name(self) -> str:
        """The tensor's name among others."""

    @property
    def dtype(self) -> DType:
        """Its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""


class ZeroedTensors:
    """Tensors by name, zeroed at the start, whose memory is asked for in pages of `page_bytes`."""

    def __init__(self, specs: Sequence[TensorSpec], what: str, *, kernels_choice: Path = _KERNELS_CHOICE) -> None:
        """Maps the tensors' memory. The operating system commits each page when it is first touched; see `commit`.

        The log calls the tensors `what`. In the file `kernels_choice` the kernel says whether it gives huge pages.
        Raises OSError if the process may not have so much memory.
        """
        sizes = [prod(spec.shape) * DTYPES[spec.dtype].size_bytes for spec in specs]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        memory, begin, self.page_bytes = _map_memory(offsets[-1], what, kernels_choice)
        # One byte of each page.
        self._pages = torch.frombuffer(memory, dtype=torch.uint8, count=offsets[-1], offset=begin)[:: mmap.PAGESIZE]
        # Each tensor keeps the mapping.
        self.tensors: dict[str, Tensor] = {
            spec.name: torch.frombuffer(
                memory, dtype=TORCH_DTYPES[spec.dtype], count=prod(spec.shape), offset=begin + offset
            ).view(spec.shape)
            for spec, offset in zip(specs, offsets[:-1], strict=True)
        }

    def commit(self) -> None:
        """Has the operating system commit every page; what the tensors hold stays.

        A step that touches new pages waits until the system has cleared them: the first tokens of a slot touch all of
        its huge pages. All threads of torch take part.
        """
        self._pages.add_(0)


class RankState(ZeroedTensors):
    """State tensors by name. Their first axis is the slot, or the block."""

    def __init__(self, layout: StateLayout, *, kernels_choice: Path = _KERNELS_CHOICE) -> None:
        """Maps the tensors' memory; see `ZeroedTensors`.

        Attention reads keys and values in huge pages faster, because the processor looks fewer addresses up. So a slot
        takes its whole memory when its first token is written.
        """
        super().__init__(layout.tensors, "KV cache", kernels_choice=kernels_choice)
        self._num_entries = layout.num_entries

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def zero(self, slots: Sequence[int] | None) -> int:
        """Zeroes the given slots or blocks, or all for None; returns the bytes written."""
        if slots is None:
            for tensor in self.tensors.values():
                tensor.zero_()
            return self.size_bytes
        for slot in slots:
            if not 0 <= slot < self._num_entries:
                raise SlotUnknown(slot, self._num_entries - 1)
        # One call for each tensor: a prefix cache gives thousands of blocks back at once.
        chosen = torch.tensor(sorted(set(slots)), dtype=torch.int64)
        for tensor in self.tensors.values():
            # torch fills no rows of float8.
            filled = tensor if tensor.itemsize > 1 else tensor.view(torch.uint8)
            filled.index_fill_(0, chosen, 0)
        return sum(len(chosen) * tensor[0].nbytes for tensor in self.tensors.values())


def _map_memory(size_bytes: int, what: str, kernels_choice: Path) -> tuple[mmap.mmap, int, int]:
    """Maps zeroed memory; returns the mapping, where in it the memory begins, and the size of its pages."""
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    begin = -address % HUGE_PAGE_BYTES
    is_given = size_bytes >= HUGE_PAGE_BYTES and _ask_for_huge_pages(memory, begin, size_bytes, what, kernels_choice)
    return memory, begin, HUGE_PAGE_BYTES if is_given else mmap.PAGESIZE


def _ask_for_huge_pages(memory: mmap.mmap, begin: int, size_bytes: int, what: str, kernels_choice: Path) -> bool:
    """Asks the kernel for huge pages and returns whether it may give them; the log says why not."""
    try:
        is_off = "[never]" in kernels_choice.read_text()
        # Not for what lies behind the last whole page: it would take a huge page, too.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    except OSError as error:
        logger.warning("the %s of %d MiB lies in small pages: %s", what, size_bytes >> 20, error)
        return False
    if is_off:
        logger.warning("the %s of %d MiB lies in small pages: %s says never", what, size_bytes >> 20, kernels_choice)
    return not is_off
