"""The noise by which tokens are drawn: a number for each seed, position and token id, the same wherever it is computed.

A token is the one whose log probability plus noise is the largest. The noise has the standard Gumbel distribution, so
that each token is drawn with its probability, whichever tokens filters have left.

The engine makes a row's keys of seed and position. What becomes of keys and ids here is shifts, and, or, xor: these are
exact in int32 on every target, also on one that multiplies and adds integers as floats.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import torch
from torch import Tensor, bitwise_left_shift, bitwise_right_shift

#: The first digits of pi after the point, as in Blowfish: without them, keys and id of 0 would stay 0.
_ROUNDS: Final = struct.unpack(
    ">12i",
    bytes.fromhex("243f6a8885a308d313198a2e03707344a4093822299f31d0082efa98ec4e6c89452821e638d01377be5466cf34e90c6c"),
)
#: For counts of bits to rotate by: how far to shift to the left and to the right, and what is left of the latter. Plain
#: numbers would become tensors in each operation.
_TURNS: Final = {
    count: torch.tensor((count, 32 - count, (1 << count) - 1), dtype=torch.int32).unbind() for count in (14, 16, 19)
}
_KEYS: Final = torch.tensor(_ROUNDS, dtype=torch.int32)


def make_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """The noise of tokens in rows, f32 [N, K], from -2.82 to 22.88.

    Takes token ids, int32 [N, K] or [K], and the rows' keys, int32 [N, 2].
    """
    bits = _mix(ids, keys[:, :1], keys[:, 1:])
    high, low = _shift_right(bits, 16) & 0xFFFF, bits & 0xFFFF
    # In (0, 1): the last factor makes 1 less than 1, which the sum rounds to. All other products are exact.
    uniform = (high.float() * 2.0**-16 + (low.float() + 0.5) * 2.0**-32) * (1 - 2.0**-24)
    exponential = -torch.log1p(-uniform)
    # The logarithm: Inductor's `log` differs from torch's in the last bit, its `log1p` does not.
    return 33 * math.log(2) - torch.log1p(exponential * 2.0**33 - 1)


def _mix(ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Hashes ids by keys to 32 bits, int32: rounds like those of the cipher SIMON over the id, once in each half."""
    left, right = ids ^ first, _rotate(ids, 16) ^ second
    for number, constant in enumerate(_ROUNDS):
        key = (second if number % 2 else first) ^ constant
        left, right = right ^ (left & _rotate(left, 19)) ^ _rotate(left, 14) ^ key, left
    return left


def _rotate(bits: Tensor, count: int) -> Tensor:
    return bitwise_left_shift(bits, _like(bits, count)) | (_shift_right(bits, 32 - count) & ((1 << count) - 1))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """It repeats the sign."""
    return bitwise_right_shift(bits, _like(bits, count))


def _like(bits: Tensor, count: int) -> Tensor:
    # Of `<<` and `>>` XLA makes a product and a quotient, which rounds otherwise; of a plain number, 64 bits.
    return torch.full((), count, dtype=bits.dtype, device=bits.device)


def make_host_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """As `make_noise`, bit by bit, for the host: in place, which takes 60 % of the time."""
    bits = _mix_in_place(ids, keys)
    uniform = ((bits >> 16) & 0xFFFF).float().mul_(2.0**-16)
    uniform += (bits & 0xFFFF).float().add_(0.5).mul_(2.0**-32)
    exponential = uniform.mul_(1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.mul_(2.0**33).sub_(1).log1p_().neg_().add_(33 * math.log(2))


def _mix_in_place(ids: Tensor, keys: Tensor) -> Tensor:
    left = ids ^ keys[:, :1]
    turned, lower = torch.empty_like(left), torch.empty_like(left)
    right = keys[:, 1:] ^ _rotate_in_place(ids.expand_as(left), 16, turned, lower)
    for key in torch.split(keys.repeat(1, len(_ROUNDS) // 2) ^ _KEYS, 1, dim=1):
        right ^= key
        right ^= _rotate_in_place(left, 14, turned, lower)
        right ^= _rotate_in_place(left, 19, turned, lower).bitwise_and_(left)
        left, right = right, left
    return left


def _rotate_in_place(bits: Tensor, count: int, turned: Tensor, lower: Tensor) -> Tensor:
    """Writes the result to `turned`; overwrites `lower`."""
    up, down, mask = _TURNS[count]
    torch.bitwise_right_shift(bits, down, out=lower).bitwise_and_(mask)
    return torch.bitwise_left_shift(bits, up, out=turned).bitwise_or_(lower)
