"""Rows of logits on the host: what changes them, their likeliest tokens, and noise.

Native code, execution/native/sampling.cpp, takes a tenth of the time of graphs, which launch hundreds of operations.
Where it has not been built, the functions of graphs do the same; both give the same bits.
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
#: What `_list_arguments` lists.
_ROW: Final = (c_void_p, c_int64, c_int64, *[c_char_p] * (len(_PAIRS) + 1))
_SIGNATURES: Final = {
    "kiln_change_row": (None, (*_ROW, c_void_p)),
    "kiln_find_top": (c_int32, (*_ROW, c_int64, c_void_p, c_void_p)),
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


def change_row(logits: Tensor, row: ProcessedRow | None) -> Tensor:
    """Changes the logits of a row, contiguous f32 [V], as `logit_changes.change_logits` does. Returns new ones."""
    if row is None or (not row.pairs and row.mask is None):
        return logits
    library = load_sampling_library()
    if library is not None:
        changed = torch.empty_like(logits)
        library.kiln_change_row(*_list_arguments(logits, row), changed.data_ptr())
        return changed
    changes = {name: _read(row.pairs.get(name, b""), dtype) for name, dtype in _PAIRS.items()}
    num_words = -(-len(logits) // WORD_BITS)
    changes["token_bitmask"] = _read(row.mask or b"\xff" * (num_words * WORD_BITS // 8), torch.int32)
    return change_logits(logits[None], changes, len(logits), None)[0]


def find_top(
    logits: Sequence[Tensor], rows: Sequence[ProcessedRow | None], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Changes rows of logits, contiguous f32 [V] each, as `change_row` does, and takes their likeliest tokens.

    Returns their logits f32 [N, count] and ids int32 [N, count], as `candidates.take_top`, and which rows are numbers,
    bool [N, 1], as `sampling.is_valid`. Logits and ids of other rows are 0.
    """
    library = load_sampling_library()
    if library is None:
        changed = torch.stack([change_row(*one) for one in zip(logits, rows, strict=True)])
        valid = sampling.is_valid(changed)
        top, ids = candidates.take_top(torch.where(valid, changed, 0.0), count)
        return top, torch.where(valid, ids, 0), valid
    top, ids = torch.empty(len(rows), count), torch.empty(len(rows), count, dtype=torch.int32)
    to_top, to_ids, step, valid_rows = top.data_ptr(), ids.data_ptr(), count * top.element_size(), []
    for place, (own, row) in enumerate(zip(logits, rows, strict=True)):
        found = library.kiln_find_top(*_list_arguments(own, row), count, to_top + place * step, to_ids + place * step)
        valid_rows.append([found])
    return top, ids, torch.tensor(valid_rows, dtype=torch.bool)


def _list_arguments(logits: Tensor, row: ProcessedRow | None) -> tuple[object, ...]:
    (vocab_size,) = logits.shape
    if row is None:
        return logits.data_ptr(), vocab_size, 0, *[None] * len(_PAIRS), None
    assert row.mask is None or 8 * len(row.mask) >= vocab_size, "native code would read beyond the mask"
    pairs = [row.pairs.get(name) for name in _PAIRS]
    return logits.data_ptr(), vocab_size, len(pairs[0] or b"") // 4, *pairs, row.mask


def _read(values: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=dtype)[None] if values else torch.zeros(1, 0, dtype=dtype)


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
