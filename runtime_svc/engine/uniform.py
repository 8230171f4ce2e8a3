"""Random numbers that belong to a request, not to a batch.

Counter-based: a number is a function of seed and index alone, so a request's tokens do not depend on who shares its
batch, on the order of steps, or on a restart.
"""

from __future__ import annotations

import hashlib
from typing import Final

# float32 holds multiples of 2**-24 exactly, so that no number is rounded up to 1.
RESOLUTION_BITS: Final = 24


def uniform(seed: int, index: int) -> float:
    """The number at `index` of a seed's sequence: a multiple of 2**-24 in [0, 1).

    It is the top 24 bits of BLAKE2b-64, keyed with the seed, of the index; both little-endian in 8 bytes.

    Args:
        seed: In [0, 2**64).
        index: Position of the generated token that it picks, from 0.
    """
    key = seed.to_bytes(8, "little")
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - RESOLUTION_BITS)) / (1 << RESOLUTION_BITS)
