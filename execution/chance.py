"""What decides between the tokens that a row can draw: numbers made of its request's seed, and of where the token is.

They are functions of these alone, so a request's tokens depend neither on the other requests of its batch, nor on the
order of steps, nor on a restart.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

# float32 holds multiples of 2**-24 exactly, so that no number is rounded up to 1.
RESOLUTION_BITS: Final = 24


def make_noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Keys of the noise that picks the token at a position: the number of tokens before it, its prompt's included.

    Two integers of 32 bits, for a seed in [0, 2**64). What continues a text with its seed, continues its draws.
    """
    first, second = struct.unpack("<2i", _hash(seed, position))
    return first, second


def uniform(seed: int, index: int) -> float:
    """The random number at `index`, from 0, of the sequence of a seed in [0, 2**64): a multiple of 2**-24 in [0, 1).

    It picks the generated token at that index of its request, with bundles of earlier releases.
    """
    return (int.from_bytes(_hash(seed, index), "little") >> (64 - RESOLUTION_BITS)) / (1 << RESOLUTION_BITS)


def _hash(seed: int, number: int) -> bytes:
    """BLAKE2b-64, keyed with the seed, of a number; both little-endian in 8 bytes."""
    return hashlib.blake2b(number.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8).digest()


#: By the input that takes them: the numbers of a row, of seed, position, and tokens of the prompt.
CHANCES: Final[Mapping[str, Callable[[int, int, int], tuple[float, ...]]]] = MappingProxyType(
    {
        "noise_keys": lambda seed, position, _: make_noise_keys(seed, position),
        "rand": lambda seed, position, num_prompt_tokens: (uniform(seed, position - num_prompt_tokens),),
    }
)
