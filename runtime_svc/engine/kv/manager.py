"""The protocol of KV managers; `SlotManager` implements it for the contiguous cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec

from runtime_svc.engine.request import Request


class Placement(msgspec.Struct, frozen=True):
    """Where the KV cache holds the keys and values of one request.

    Attributes:
        blocks: Blocks of the cache, in order of the positions that they hold. In the contiguous cache a request has
            one block, its slot, which holds every position.
    """

    blocks: tuple[int, ...]


class KvManager(Protocol):
    """Divides the KV cache among requests."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""

    @property
    def block_tokens(self) -> int:
        """Tokens that a block has room for."""

    def reserve(self, request: Request, num_tokens: int) -> Placement | None:
        """Makes room for the next tokens of a request, in addition to its `num_computed_tokens`.

        What the request holds already stays where it is. Reserving the same tokens again changes nothing.

        Args:
            request: May hold nothing yet.
            num_tokens: At least 1.

        Returns:
            Everything that the request holds now; None, and nothing has changed, if the cache has no room.
        """

    def release(self, request: Request) -> int:
        """Takes back every part of the cache that a request holds, if it holds any.

        Steps in flight may still write it. The next owner's steps run after them.

        Returns:
            The number of blocks that it held.
        """

    def reset(self) -> None:
        """Forgets what the cache contains, so that no later request reuses it. Requests keep what they hold."""

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Asserts that no part of the cache is lost or held twice, that only `requests` hold any, and that each has
        room for its computed tokens."""
