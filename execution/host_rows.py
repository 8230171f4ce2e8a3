"""Rows of logits on the host: what changes them, their likeliest tokens, and noise.

Native code does so in a tenth of the time that graphs take, which launch hundreds of operations. Where it has not been
built, the functions of graphs do; both give the same bits. It is declared in execution/native/sampling.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from bundle.abi.inputs import WORD_BITS
from execution import candidates, noise, sampling
from execution.logit_changes import change_logits
from execution.step import ProcessedRow

_PAIRS: Final = {"pair_ids": torch.int32} | dict.fromkeys(("pair_bias", "pair_factor", "pair_penalty"), torch.float32)
_SIGNATURES: Final = {
    "kiln_is_valid": (c_int32, (c_void_p, c_int64)),
    "kiln_change_row": (None, (c_void_p, c_int64, c_int64, *[c_char_p] * (len(_PAIRS) + 1), c_void_p)),
    "kiln_take_top": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "kiln_mix": (None, (c_void_p, c_int64, c_int32, c_int32, c_void_p, c_int64, c_void_p)),
}
_ROUNDS: Final = (c_int32 * len(noise.ROUNDS))(*noise.ROUNDS)


@cache
def load_sampling_library() -> ctypes.CDLL | None:
    """Loads the library; returns None if it has not been built."""
    spec = find_spec("execution._sampling")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def is_valid(rows: Sequence[Tensor]) -> Tensor:
    """As `sampling.is_valid`, of rows of logits, contiguous f32 [V] each."""
    library = load_sampling_library()
    if library is None:
        return sampling.is_valid(torch.stack([*rows]))
    return torch.tensor([[library.kiln_is_valid(row.data_ptr(), len(row))] for row in rows], dtype=torch.bool)


def change_row(logits: Tensor, row: ProcessedRow) -> Tensor:
    """Changes the logits of a row, contiguous f32 [V], as `logit_changes.change_logits` does. Returns new ones."""
    library = load_sampling_library()
    if library is not None:
        changed, pairs = torch.empty_like(logits), [row.pairs.get(name) for name in _PAIRS]
        num_pairs = len(pairs[0] or b"") // 4
        library.kiln_change_row(logits.data_ptr(), len(logits), num_pairs, *pairs, row.mask, changed.data_ptr())
        return changed
    if not row.pairs and row.mask is None:
        return logits
    changes = {name: _read(row.pairs.get(name, b""), dtype) for name, dtype in _PAIRS.items()}
    num_words = -(-len(logits) // WORD_BITS)
    changes["token_bitmask"] = _read(row.mask or b"\xff" * (num_words * WORD_BITS // 8), torch.int32)
    return change_logits(logits[None], changes, len(logits), None)[0]


def _read(values: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=dtype)[None] if values else torch.zeros(1, 0, dtype=dtype)


def take_top(rows: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """As `candidates.take_top`, of rows of logits, contiguous f32 [V] each."""
    library = load_sampling_library()
    if library is None:
        return candidates.take_top(torch.stack([*rows]), count)
    top, ids = torch.empty(len(rows), count), torch.empty(len(rows), count, dtype=torch.int32)
    for row, own, own_ids in zip(rows, top, ids, strict=True):
        library.kiln_take_top(row.data_ptr(), len(row), count, own.data_ptr(), own_ids.data_ptr())
    return top, ids


def make_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """As `noise.make_noise`."""
    library = load_sampling_library()
    if library is None:
        return noise.make_noise(ids, keys)
    ids = ids.expand(len(keys), -1).contiguous()
    bits = torch.empty_like(ids)
    for own, own_keys, own_bits in zip(ids, keys.tolist(), bits, strict=True):
        library.kiln_mix(own.data_ptr(), len(own), *own_keys, _ROUNDS, len(_ROUNDS), own_bits.data_ptr())
    return noise.spread(bits)
