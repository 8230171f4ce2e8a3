"""Rows of logits on the host: what changes them, their likeliest tokens, and noise.

Native code, execution/native/sampling.cpp, takes a tenth of the time of graphs, which launch hundreds of operations.
Where it has not been built, the functions of graphs do the same; both give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from bundle.abi.inputs import WORD_BITS
from execution import candidates, noise, sampling
from execution.logit_changes import change_logits
from execution.step import ProcessedRow

_PAIRS: Final = {"pair_ids": torch.int32} | dict.fromkeys(("pair_bias", "pair_factor", "pair_penalty"), torch.float32)
_SIGNATURES: Final = {
    "kiln_change_row": (c_void_p, c_int64, c_void_p),
    "kiln_find_top": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
    "kiln_keep_nucleus": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "kiln_draw_uniform": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p),
    "kiln_scale": (c_int64, c_float, c_void_p),
    "kiln_draw": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p),
}
_ROUNDS: Final = (c_int32 * len(noise.ROUNDS))(*noise.ROUNDS)


class RowToDraw(NamedTuple):
    """A row of logits: its place among them, and what changes it. `sampling_params` are as in `sampling.sample`."""

    place: int
    processed: ProcessedRow | None = None
    sampling_params: tuple[float, float, float] = (0.0, 1.0, 1.0)


class _Row(ctypes.Structure):
    """Where native code finds a row of logits, and what changes it."""

    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("temperature", c_float),
        ("num_pairs", c_int64),
        *((name, c_char_p) for name in _PAIRS),
        ("mask", c_char_p),
    ]


@cache
def load_sampling_library() -> ctypes.CDLL | None:
    """Loads the library; returns None if it has not been built."""
    spec = find_spec("execution._sampling")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    return library


def change_row(logits: Tensor, row: ProcessedRow | None) -> Tensor:
    """Changes the logits of a row, contiguous f32 [V], as `logit_changes.change_logits` does. Returns new ones."""
    if row is None or (not row.pairs and row.mask is None):
        return logits
    library = load_sampling_library()
    if library is not None:
        changed = torch.empty_like(logits)
        library.kiln_change_row(_describe(logits[None], [RowToDraw(0, row)]), len(logits), changed.data_ptr())
        return changed
    changes = {name: _read(row.pairs.get(name, b""), dtype) for name, dtype in _PAIRS.items()}
    num_words = -(-len(logits) // WORD_BITS)
    changes["token_bitmask"] = _read(row.mask or b"\xff" * (num_words * WORD_BITS // 8), torch.int32)
    return change_logits(logits[None], changes, len(logits), None)[0]


def find_top(logits: Tensor, rows: Sequence[RowToDraw], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Changes some rows of logits, f32 [M, V], as `change_row` does, and takes their likeliest tokens.

    Returns scores f32 [N, count], as `sampling.score`; ids int32 [N, count], as `candidates.take_top`; which rows are
    numbers, bool [N, 1], as `sampling.is_valid`. Scores and ids of other rows are 0.
    """
    library = load_sampling_library()
    if library is None:
        changed = torch.stack([change_row(logits[one.place], one.processed) for one in rows])
        valid = sampling.is_valid(changed)
        top, ids = candidates.take_top(torch.where(valid, changed, 0.0), count)
        params = torch.tensor([one.sampling_params for one in rows])
        return sampling.score(top, top[:, :1], params), torch.where(valid, ids, 0), valid
    scores, ids = torch.empty(len(rows), count), torch.empty(len(rows), count, dtype=torch.int32)
    valid = torch.empty(len(rows), 1, dtype=torch.bool)
    sizes = (len(rows), logits.shape[1], count)
    library.kiln_find_top(_describe(logits, rows), *sizes, scores.data_ptr(), ids.data_ptr(), valid.data_ptr())
    return scores, ids, valid


def _describe(logits: Tensor, rows: Sequence[RowToDraw]) -> ctypes.Array[_Row]:
    """Describes rows to native code, which must not outlive the logits."""
    assert logits.dtype == torch.float32, "native code reads no other numbers"
    assert logits.stride(1) == 1, "native code reads a row from its start to its end"
    start, step = logits.data_ptr(), logits.stride(0) * logits.element_size()
    least = logits.shape[1] / 8
    described = (_Row * len(rows))()
    for own, row in zip(described, rows, strict=True):
        own.logits = start + row.place * step
        own.temperature = row.sampling_params[2]
        if row.processed is not None:
            mask = row.processed.mask
            assert mask is None or len(mask) >= least, "native code would read beyond the mask"
            own.mask = mask
            for name, numbers in row.processed.pairs.items():
                setattr(own, name, numbers)
                own.num_pairs = len(numbers) // 4
    return described


def _read(values: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=dtype)[None] if values else torch.zeros(1, 0, dtype=dtype)


def keep_nucleus(scores: Tensor, weights: Tensor, measure: Tensor, top_p: Tensor) -> None:
    """Excludes from scores, contiguous f32 [N, K], all but the first one and those that `sampling.find_nucleus` finds.

    Other arguments are as there, contiguous but for `top_p`.
    """
    library = load_sampling_library()
    if library is None:
        is_kept = sampling.find_nucleus(weights, measure, top_p)
        is_kept[:, 0] = True
        scores.masked_fill_(~is_kept, float("-inf"))
        return
    assert all(one.is_contiguous() for one in (scores, weights, measure)), "native code reads one row behind the other"
    weighed = weights.data_ptr(), measure.data_ptr(), top_p.data_ptr(), top_p.stride(0)
    library.kiln_keep_nucleus(*weighed, *scores.shape, scores.data_ptr())


def make_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """As `noise.make_noise`, for ids int32 [K], [1, K] or [N, K]."""
    _check_integers(ids, keys)
    library = load_sampling_library()
    return noise.make_noise(ids, keys) if library is None else noise.MOST - _draw_rest(library, ids, keys)


def draw(ids: Tensor, scores: Tensor, keys: Tensor) -> Tensor:
    """As `sampling.draw`, for rows that are not greedy; scores are contiguous."""
    _check_integers(ids, keys)
    assert scores.is_contiguous(), "native code reads one row behind the other"
    library = load_sampling_library()
    if library is None:
        return sampling.pick_largest(ids, scores + noise.make_noise(ids, keys))
    rest, tokens = _draw_rest(library, ids, keys), torch.empty(len(scores), dtype=torch.int32)
    ids = ids.expand(len(keys), -1)
    numbers = scores.data_ptr(), rest.data_ptr(), noise.MOST
    library.kiln_draw(ids.data_ptr(), ids.stride(0), *ids.shape, *numbers, tokens.data_ptr())
    return tokens


def _check_integers(ids: Tensor, keys: Tensor) -> None:
    assert ids.dtype == keys.dtype == torch.int32, "native code reads no other numbers"


def _draw_rest(library: ctypes.CDLL, ids: Tensor, keys: Tensor) -> Tensor:
    """What noise is less than `noise.MOST`. Its logarithms are torch's: others have other bits."""
    ids, keys = ids.expand(len(keys), -1), keys.contiguous()
    assert ids.stride(1) == 1, "native code reads a row from its start to its end"
    rest = torch.empty(ids.shape)
    library.kiln_draw_uniform(
        ids.data_ptr(), ids.stride(0), *ids.shape, keys.data_ptr(), _ROUNDS, len(_ROUNDS), rest.data_ptr()
    )
    rest.log1p_()
    library.kiln_scale(rest.numel(), noise.SCALE, rest.data_ptr())
    return rest.log1p_()
