"""Orders likeliest tokens and sums weights, so that neither depends on how ranks divide the vocabulary.

There are two forms of both, which give equal tokens. The CPU packs a logit and an id into 64 bits, and sums 64-bit
integers. Other devices get graphs whose keys and sums are float32, because compilers for them take no others: Neuron's
refuses the top-k of integers and has no exact sums of 64 bits. Integers up to 2**24 are exact in float32, in any order
of additions.

Importing this module registers the operators `kiln::argmax` and `kiln::topk`, which only the second form calls. A
compiler that has operators of its own for them gets them by registering these for the device's key; see
`compiler_svc.lower.xla`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from targets.neuron import MAX_CANDIDATES

#: Weights are summed as integer multiples of 2 to the minus this, so that the sum does not depend on how the vocabulary
#: is divided.
_WEIGHT_BITS: Final = 40
#: Integers up to 2 to this are exact in float32.
_EXACT_BITS: Final = 24
#: Ids of tokens are less than this. Keys of the second form are integers up to twice as many.
_MAX_IDS: Final = 2 ** (_EXACT_BITS - 1)


def has_wide_integers(device: torch.device) -> bool:
    """Whether graphs for a device may sort and sum 64-bit integers."""
    return device.type == "cpu"


def index_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of indices that graphs for a device compute; None: torch's own, int64."""
    return None if has_wide_integers(device) else torch.int32


def is_below_infinity(values: Tensor) -> Tensor:
    """Tells which values are numbers less than infinity, elementwise; negative infinity is."""
    if has_wide_integers(values.device):
        return values < float("inf")
    # A number that is no tensor would be compared as float64.
    return values < torch.full_like(values, float("inf"))


def is_finite(values: Tensor) -> Tensor:
    """Tells which values are neither NaN nor infinite, elementwise."""
    return values.isfinite() if has_wide_integers(values.device) else is_below_infinity(values.abs())


def find_likeliest(logits: Tensor) -> Tensor:
    """As `sampling.greedy`, for logits that are valid: f32 [N, V] to int32 [N]."""
    if has_wide_integers(logits.device):
        return _argmax(logits)
    _check_ids(logits.shape[-1])
    # The operator leaves open which of equal values it takes: no two keys are equal.
    is_likeliest = logits == logits.amax(dim=-1, keepdim=True)
    keys = torch.where(is_likeliest, 1.0 * _MAX_IDS, 0.0) - _number(logits).float()
    ids: Tensor = torch.ops.kiln.argmax(keys)
    return ids


def take_top(logits: Tensor, count: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, likeliest first; of equally likely ones, the lowest id first.

    Args:
        logits: f32 [N, M].
        ids: Ids of the tokens, int32 [N, M], all different and not negative; None: their indices. Except on the CPU,
            ids are less than 2**23, and more tokens than that raise ValueError.

    Returns:
        Logits f32 [N, count] and ids int32 [N, count]; of a row with NaN, they may be any.
    """
    if has_wide_integers(logits.device):
        return _take_by_packed_keys(logits, count, ids)
    _check_ids(logits.shape[-1])
    if count > MAX_CANDIDATES:
        return _take_by_sorting(logits, count, ids)
    return _take_by_comparing(logits, count, ids)


def _number(values: Tensor) -> Tensor:
    return torch.arange(values.shape[-1], dtype=torch.int32, device=values.device)


def _take_by_packed_keys(logits: Tensor, count: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    places = _number(logits)
    # topk leaves the order of equal logits open. Packed into one integer, a value and an id are never equal to others.
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = ascending.to(torch.int64) * 2**32 - (places if ids is None else ids)
    top = keys.topk(count, dim=-1).indices
    return logits.gather(-1, top), top.to(torch.int32) if ids is None else ids.gather(-1, top)


def _take_by_comparing(logits: Tensor, count: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Takes the top of floats twice: it leaves open which of equal logits it takes, and in what order."""
    order = (_number(logits) if ids is None else ids).float()
    # Zeros of both signs are equal.
    threshold = torch.ops.kiln.topk(torch.where(logits == 0, 0.0, logits), count)[0][:, -1:]
    # Values above the threshold before those at it, and of either the lowest id first: no two keys are equal.
    class_start = torch.where(logits > threshold, 2.0 * _MAX_IDS, torch.where(logits == threshold, 1.0 * _MAX_IDS, 0.0))
    places = torch.ops.kiln.topk(class_start - order, count)[1]
    taken, own = logits.gather(-1, places), places if ids is None else ids.gather(-1, places)
    # Equal logits stand in the order of their ids now.
    is_earlier = _number(taken)[None, :] < _number(taken)[:, None]
    one, other = taken[:, :, None], taken[:, None, :]
    rank = count_chosen((other > one) | ((other == one) & is_earlier))
    is_own_place = rank == _number(taken)
    # A sum of one number and zeros is exact. Rows with NaN have no order, but nor an index that is out of range.
    ordered = torch.where(is_own_place, one, 0.0).sum(dim=1)
    ordered_ids = torch.where(is_own_place, own[:, :, None], 0).sum(dim=1, dtype=torch.int32)
    return ordered, ordered_ids


def _take_by_sorting(logits: Tensor, count: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sorts floats, twice if the ids are in no order. Neuron's compiler may not take it."""
    if ids is not None:
        by_id = ids.float().sort(dim=-1, stable=True).indices.to(torch.int32)
        logits, ids = logits.gather(-1, by_id), ids.gather(-1, by_id)
    top = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count].to(torch.int32)
    return logits.gather(-1, top), top if ids is None else ids.gather(-1, top)


def count_chosen(chosen: Tensor) -> Tensor:
    """Counts what is true in each row: bool [..., M] to [..., 1] of `index_dtype`."""
    return chosen.sum(dim=-1, keepdim=True, dtype=index_dtype(chosen.device))


def sum_exactly(weights: Tensor, vocab_size: int) -> Tensor:
    """Sums weights f32 [N, M], from 0 to 1, of a vocabulary of `vocab_size` tokens, or of a part of it.

    The sums of parts add up to the whole without rounding. They are int64 [N, 1] on the CPU, f32 [N, digits] elsewhere,
    for `carry_sums` and `round_sum`.
    """
    if has_wide_integers(weights.device):
        return (weights / 2.0**-_WEIGHT_BITS).to(torch.int64).sum(dim=-1, keepdim=True)
    bits = _digit_bits(vocab_size)
    num_digits = -(-_WEIGHT_BITS // bits)
    rest = weights * 2.0 ** (_WEIGHT_BITS - bits * (num_digits - 1))
    sums = []
    for _ in range(num_digits):
        digit = rest.floor()
        sums.append(digit.sum(dim=-1, keepdim=True))
        rest = (rest - digit) * 2.0**bits
    return torch.cat(sums, dim=-1)


def _digit_bits(vocab_size: int) -> int:
    """Bits of a digit such that the sum of a vocabulary's digits is exact; at least one."""
    _check_ids(vocab_size)
    return _EXACT_BITS - (vocab_size - 1).bit_length()


def _check_ids(vocab_size: int) -> None:
    if vocab_size > _MAX_IDS:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; without 64-bit integers, accepted: at most {_MAX_IDS}")


def carry_sums(sums: Tensor) -> Tensor:
    """Sums in a dtype that ranks can exchange, [N, C]."""
    return sums.view(torch.int32) if has_wide_integers(sums.device) else sums


def add_sums(carried: Tensor, tp_degree: int) -> Tensor:
    """Adds the sums that ranks carried, side by side: [N, tp_degree * C] to what `sum_exactly` gives of the whole."""
    if has_wide_integers(carried.device):
        return carried.view(torch.int64).sum(dim=-1, keepdim=True)
    return carried.view(carried.shape[0], tp_degree, -1).sum(dim=1)


def round_sum(sums: Tensor, vocab_size: int) -> Tensor:
    """The sum of weights, f32 [N, 1]; `vocab_size` is what `sum_exactly` got."""
    if has_wide_integers(sums.device):
        return sums.float() * 2.0**-_WEIGHT_BITS
    bits = _digit_bits(vocab_size)
    num_digits = sums.shape[-1]
    total = sums[:, :1] * 2.0 ** (bits * (num_digits - 1) - _WEIGHT_BITS)
    for index in range(1, num_digits):
        total = total + sums[:, index : index + 1] * 2.0 ** (bits * (num_digits - 1 - index) - _WEIGHT_BITS)
    return total


def _argmax(values: Tensor) -> Tensor:
    return values.argmax(dim=-1).to(torch.int32)


def _topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    largest = values.topk(count, dim=-1)
    return largest.values, largest.indices.to(torch.int32)


def _fake_argmax(values: Tensor) -> Tensor:
    return values.new_empty(values.shape[:-1], dtype=torch.int32)


def _fake_topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*values.shape[:-1], count)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.int32)


_LIBRARY: Final = torch.library.Library("kiln", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _run, _fake in (
    ("argmax(Tensor values) -> Tensor", _argmax, _fake_argmax),
    ("topk(Tensor values, int count) -> (Tensor, Tensor)", _topk, _fake_topk),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kiln::{_name}", _fake, lib=_LIBRARY)
