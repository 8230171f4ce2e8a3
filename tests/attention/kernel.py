"""The attention kernel by itself, compiled for one instruction set and called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from compiler_svc.lower.attend import compile_attend_kernel, name_function, write_kernel_source
from compiler_svc.lower.common_objects import compile_once
from compiler_svc.lower.job import LoweringJob
from targets.cpu import X86_64
from tests.kernel_library import load_kernel

#: The dtypes of queries and of caches that are tried.
PAIRS: Final = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.int8),
)


#: The dtypes that the kernel multiplies by pairs if it is compiled for this.
_CHOSEN: Final = (torch.bfloat16, torch.bfloat16)
_HAS_PAIRS: Final = "-mavx512bf16"
#: Overrules what the kernel thinks of the processor.
_CHOOSE: Final = 'extern "C" void multiply_pairs() { kiln::multiplies_pairs = true; }\n'


def _compile(job: LoweringJob) -> Iterator[Path]:
    """Compiles the objects that libraries link with, but one with pairs: its variable takes a compile of its own."""
    chosen = [_CHOSEN] if _has_pairs(job.options.target.isa) else []
    for pair in PAIRS:
        if pair not in chosen:
            yield compile_attend_kernel(job, pair)
    if chosen:
        yield compile_once(job, "attend_pairs", write_kernel_source(chosen) + _CHOOSE)


def _has_pairs(isa: str) -> bool:
    return _HAS_PAIRS in X86_64[isa].extensions


class AttendKernel:
    """The functions for all of `PAIRS`."""

    def __init__(self, isa: str) -> None:
        """Compiles for an instruction set, and multiplies bfloat16 by pairs if that has them."""
        self._library = load_kernel(isa, _compile)
        if _has_pairs(isa):
            self._library.multiply_pairs()

    def attend(self, arguments: list[Any], options: dict[str, Any], threads: int = 2) -> Tensor:
        """`kiln::attend_in_place`. Outputs of tokens without a position are NaN."""
        queries, keys, values, key_cache, value_cache, positions, block_table, sinks, slopes, tree_mask = arguments
        rows, tokens, heads, head_dim = queries.shape
        attended = torch.full((rows, tokens, heads, head_dim), float("nan"), dtype=queries.dtype)
        tensors = (attended, queries, keys, values, key_cache, value_cache, positions, block_table)
        has_masks = tree_mask is not None and tree_mask.dim() == 3
        sizes = (
            *(rows, tokens, heads, key_cache.shape[1], head_dim, key_cache.shape[2], block_table.shape[1]),
            *(queries.stride(1), keys.stride(1), values.stride(1), tokens * tokens if has_masks else 0),
        )
        self._library.set_threads(threads)
        getattr(self._library, name_function(queries.dtype, key_cache.dtype))(
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            *(ctypes.c_void_p(None if one is None else one.data_ptr()) for one in (sinks, slopes, tree_mask)),
            *map(ctypes.c_int64, sizes),
            ctypes.c_double(options["scale"]),
            ctypes.c_int64(options.get("window", 0)),
            ctypes.c_double(options.get("soft_cap", 0.0)),
        )
        return attended
