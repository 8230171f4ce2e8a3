"""The block KV cache: sequences hold blocks of a few tokens, and share those with equal beginnings.

A full block is known by a key: a hash over its tokens and all before them. A request finds blocks by the keys of its
own tokens and holds them without a copy, also while other requests hold them: nothing writes a full block again. Blocks
that no request holds keep what they contain until their room is needed; those unused for longest go first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request


@dataclass(slots=True)
class _Holding:
    """What a request holds.

    Attributes:
        root: Where the chain of its keys begins.
        placement: Its blocks.
        keys: Keys of its first blocks: of those that are full of computed tokens.
    """

    root: bytes
    placement: Placement = field(default_factory=lambda: Placement(()))
    keys: list[bytes] = field(default_factory=list)


class BlockManager:
    """Hands out blocks 0 to `num_blocks - 1` and counts who holds each.

    A block is in one of three states: held by one or more requests; idle, if no request holds it and its key is known;
    or free.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, caches_prefixes: bool) -> None:
        """Starts with every block free; each has room for `block_tokens` tokens.

        Args:
            caches_prefixes: Let requests find blocks that others have computed.
        """
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._caches_prefixes = caches_prefixes
        self._held: dict[Request, _Holding] = {}
        self._num_holders = [0] * num_blocks
        # The lowest is taken first, and what was freed last: it may still be in a processor's cache.
        self._free = list(reversed(range(num_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()
        # The two directions of one relation.
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Part of every chain's root: what was computed before a reset is found by no request that starts after it.
        self._num_resets = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold; a block that several share counts once."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def find_prefix(self, request: Request) -> int:
        """Counts the tokens at the beginning of a request that the cache holds, in whole blocks.

        The newest token never counts, because a step has to compute it: its logits are what the request wants.
        """
        if request in self._held:
            return 0
        return len(self._match(request, request.num_tokens - 1)) * self.block_tokens

    def will_find_more(self, request: Request, num_cached: int, other: Request) -> bool:
        """Tells whether another request has the same next block, and the same tokens before it."""
        end = num_cached + self.block_tokens
        if not self._caches_prefixes or request.cache_salt != other.cache_salt:
            return False
        return end < request.num_tokens and request.tokens_at(0, end) == other.tokens_at(0, end)

    def reserve(self, request: Request, num_tokens: int, *, num_cached: int = 0) -> Placement | None:
        """Gives a request blocks for its next tokens; None if too few are free or idle."""
        holding = self._held.get(request)
        if holding is None:
            return self._begin(request, num_tokens, num_cached)
        assert not num_cached, f"{request.request_id} holds blocks already"
        num_missing = self._count_blocks(request.num_computed_tokens + num_tokens) - len(holding.placement.blocks)
        if num_missing > 0:
            if num_missing > len(self._free) + len(self._idle):
                return None
            holding.placement = Placement(holding.placement.blocks + self._take(num_missing))
        return holding.placement

    def commit(self, request: Request) -> None:
        """Makes the full blocks of a request's computed tokens known by their keys, unless other blocks are."""
        if not self._caches_prefixes:
            return
        holding = self._held[request]
        for index in range(len(holding.keys), request.num_computed_tokens // self.block_tokens):
            key = self._hash(holding.keys[-1] if index else holding.root, request, index)
            holding.keys.append(key)
            block = holding.placement.blocks[index]
            if key not in self._blocks:
                self._blocks[key] = block
                self._keys[block] = key

    def release(self, request: Request) -> int:
        """Takes back the blocks of a request, if it holds any; returns how many it held."""
        holding = self._held.pop(request, None)
        if holding is None:
            return 0
        # The end of a sequence goes first: its beginning is what others may share.
        for block in reversed(holding.placement.blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)
        return len(holding.placement.blocks)

    def reset(self) -> list[int]:
        """Forgets every key, so that idle blocks are free; returns these."""
        idle = list(self._idle)
        self._idle.clear()
        self._free += idle
        self._blocks.clear()
        self._keys.clear()
        self._num_resets += 1
        return idle

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Asserts that holders, states and keys of all blocks agree, and that only `requests` hold any."""
        holders: Counter[int] = Counter()
        for request, holding in self._held.items():
            assert request in requests, f"{request.request_id} holds blocks and does not run"
            blocks = holding.placement.blocks
            holders.update(blocks)
            assert len(set(blocks)) == len(blocks), f"{request.request_id} holds a block twice: {blocks}"
            for block in blocks[len(holding.keys) :]:
                assert self._num_holders[block] == 1, f"{request.request_id} shares block {block}, which is not full"
        for request in requests:
            held = self._held.get(request)
            num_held = 0 if held is None else len(held.placement.blocks)
            has_room = request.num_computed_tokens <= num_held * self.block_tokens
            assert has_room, f"{request.request_id} lost blocks: it has {num_held}"
        counts = [holders[block] for block in range(self.num_blocks)]
        assert counts == self._num_holders, f"blocks have {counts} holders; {self._num_holders} are counted"
        blocks_of_all = sorted([*self._free, *self._idle, *holders])
        assert blocks_of_all == list(range(self.num_blocks)), f"held, idle and free blocks are {blocks_of_all}"
        assert self._keys.keys().isdisjoint(self._free), "a free block has a key"
        assert self._keys.keys() >= self._idle.keys(), "an idle block has no key"
        assert {block: key for key, block in self._blocks.items()} == self._keys, "keys and blocks disagree"

    def _begin(self, request: Request, num_tokens: int, num_cached: int) -> Placement | None:
        """Gives a request that holds nothing the blocks of `num_cached` tokens that the cache holds, and new ones."""
        assert not request.num_computed_tokens, f"{request.request_id} has computed tokens and no blocks"
        matched = self._match(request, num_cached)
        assert len(matched) * self.block_tokens == num_cached, f"{num_cached} tokens of {request.request_id} are gone"
        num_missing = self._count_blocks(num_cached + num_tokens) - len(matched)
        num_idle = sum([not self._num_holders[block] for block in matched.values()])
        if num_missing > len(self._free) + len(self._idle) - num_idle:
            return None
        for block in matched.values():
            self._idle.pop(block, None)
            self._num_holders[block] += 1
        placement = Placement((*matched.values(), *self._take(num_missing)))
        self._held[request] = _Holding(self._root(request), placement, list(matched))
        return placement

    def _take(self, count: int) -> tuple[int, ...]:
        """Takes free blocks, and then idle ones, of which there must be enough."""
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                del self._blocks[self._keys.pop(block)]
            self._num_holders[block] = 1
            taken.append(block)
        return tuple(taken)

    def _match(self, request: Request, max_tokens: int) -> dict[bytes, int]:
        """Finds the known blocks at the beginning of a request, at most `max_tokens` tokens: block by key, in order."""
        matched: dict[bytes, int] = {}
        if not self._blocks:
            return matched
        key = self._root(request)
        for index in range(max_tokens // self.block_tokens):
            key = self._hash(key, request, index)
            block = self._blocks.get(key)
            if block is None:
                break
            matched[key] = block
        return matched

    def _root(self, request: Request) -> bytes:
        """Where the chain of a request's keys begins: requests with other roots share nothing."""
        return hashlib.blake2b(
            request.cache_salt.encode(), digest_size=32, salt=self._num_resets.to_bytes(16, "little")
        ).digest()

    def _hash(self, previous: bytes, request: Request, index: int) -> bytes:
        """The key of a request's block: a hash over its tokens and the key of the block before it."""
        tokens = request.tokens_at(index * self.block_tokens, self.block_tokens)
        return hashlib.blake2b(array("q", tokens), digest_size=32, key=previous).digest()

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)
