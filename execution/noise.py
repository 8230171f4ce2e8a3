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
ROUNDS: Final = struct.unpack(
    ">12i",
    bytes.fromhex("243f6a8885a308d313198a2e03707344a4093822299f31d0082efa98ec4e6c89452821e638d01377be5466cf34e90c6c"),
)

#: Exponentially distributed numbers are at least the inverse of half of this, so that noise is finite.
SCALE: Final = 2.0**33
#: Its logarithm.
MOST: Final = 33 * math.log(2)


def make_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """The noise of tokens in rows, f32 [N, K], from -2.82 to 22.88.

    Takes token ids, int32 [N, K] or [K], and the rows' keys, int32 [N, 2].
    """
    return spread(draw_uniform(ids, keys))


def draw_uniform(ids: Tensor, keys: Tensor) -> Tensor:
    """A number in (0, 1) for each token, of which none is likelier than others, f32; arguments as in `make_noise`."""
    bits = mix(ids, keys[:, :1], keys[:, 1:])
    high, low = _shift_right(bits, 16) & 0xFFFF, bits & 0xFFFF
    # The last factor makes 1 less than 1, which the sum rounds to. All other products are exact.
    return (high.float() * 2.0**-16 + (low.float() + 0.5) * 2.0**-32) * (1 - 2.0**-24)


def spread(uniform: Tensor) -> Tensor:
    """Gives what `draw_uniform` draws the distribution of noise, elementwise."""
    exponential = -torch.log1p(-uniform)
    # The logarithm: Inductor's `log` differs from torch's in the last bit, its `log1p` does not.
    return MOST - torch.log1p(exponential * SCALE - 1)


def mix(ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Hashes ids by keys to 32 bits, int32: rounds like those of the cipher SIMON over the id, once in each half."""
    left, right = ids ^ first, _rotate(ids, 16) ^ second
    for number, constant in enumerate(ROUNDS):
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
