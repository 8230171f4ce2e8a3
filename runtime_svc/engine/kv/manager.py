"""The protocol of KV managers; `SlotManager` implements it for the contiguous cache, `BlockManager` for blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec

from runtime_svc.engine.request import Request, Session


class Placement(msgspec.Struct, frozen=True):
    """Where the KV cache holds the keys and values of one request: its blocks, in the order of their positions.

    In the contiguous cache a request has one block, its slot, which holds every position.
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

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests find what others have computed, besides what their sessions keep."""

    @property
    def num_evictions(self) -> int:
        """How often a session lost what was kept for it because room was short."""

    def find_prefix(self, request: Request) -> int:
        """Counts the tokens at the beginning of a request whose keys and values are in the cache already.

        They are those that the cache keeps for its session, or those that it shares, whichever are more.

        Returns:
            What `reserve` takes as `num_cached` until another request reserves; less than the request's tokens, and 0
            if the request holds something already.
        """

    def will_find_more(self, request: Request, num_cached: int, other: Request) -> bool:
        """Tells whether a request finds more than `num_cached` tokens in the cache once `other` is computed."""

    def reserve(self, request: Request, num_tokens: int, *, num_cached: int = 0) -> Placement | None:
        """Makes room for the next tokens of a request, in addition to its `num_computed_tokens`.

        What the request holds already stays where it is. Reserving the same tokens again changes nothing. A request
        that held nothing takes over what is kept for its session. If room is short, the sessions unused for longest
        lose what is kept for them.

        Args:
            request: May hold nothing yet.
            num_tokens: At least 1.
            num_cached: Of a request that holds nothing, the tokens before those: all that `find_prefix` found, or 0.

        Returns:
            Everything that the request holds now; None, and nothing has changed, if the cache has no room.
        """

    def commit(self, request: Request) -> None:
        """Takes in that the cache holds the computed tokens of a request, so that others may share them."""

    def release(self, request: Request) -> int:
        """Takes back every part of the cache that a request holds, if it holds any.

        Steps in flight may still write it. The next owner's steps run after them.

        Returns:
            The number of blocks that it held.
        """

    def keep(self, request: Request) -> int:
        """Takes back what a request holds as `release` does, but keeps its computed tokens for its session.

        Keeps nothing that was computed before a reset.
        """

    def forget(self, session: Session) -> None:
        """Frees what is kept for a session, if anything is. Requests may share it until its room is needed."""

    def erase(self, session: Session) -> list[int]:
        """Frees what is kept for a session, so that no later request finds it.

        Returns:
            The blocks that it had and nothing else holds, which the caller may overwrite.
        """

    def reset(self) -> list[int]:
        """Forgets what the cache contains and keeps, so that no later request finds it. Requests keep what they hold.

        Returns:
            The blocks that were kept only because a later request might share or continue them.
        """

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Asserts that no part of the cache is lost or held twice, that only `requests` hold any besides sessions that
        no request runs for, and that each has room for its computed tokens."""
