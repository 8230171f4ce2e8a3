"""The size of the largest request that a server takes. Services that know no wire state it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

#: A request of at most this many bytes is parsed at once, in milliseconds, whatever it holds.
SMALL_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class RequestLimit:
    """The size of the largest request that a server takes, in bytes on the wire and in fields.

    Each value is a field, and each element of a list that is not packed; those of messages inside it count, too.
    """

    max_bytes: int = SMALL_BYTES
    max_fields: int = SMALL_BYTES

    @classmethod
    def join(cls, limits: Iterable[Self]) -> RequestLimit:
        """Returns the limit that takes what any of `limits` takes; that of small requests if there are none."""
        limits = (cls(), *limits)
        return cls(max(one.max_bytes for one in limits), max(one.max_fields for one in limits))
