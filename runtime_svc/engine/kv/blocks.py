"""The block KV cache: sequences hold blocks of a few tokens, and share those with equal beginnings.

A full block is known by a key: a hash over its tokens and all before them. A request finds blocks by the keys of its
own tokens and holds them without a copy, also while other requests hold them: nothing writes a full block again. Blocks
that no request holds keep what they contain until their room is needed; those unused for longest go first. Without
prefix caching, a key of the call is part of all keys, so only the sequences of one call find each other's blocks.

A session keeps the blocks of its last request, whose last one may be part full. Its next request continues them at any
position that it may write: in a block with a key it may not, so that it goes back to the beginning of that block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from runtime_svc.engine.kv.kept_sequences import SessionKeeper, choose_evicted
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request, Session


@dataclass(slots=True)
class _Chain:
    """Keys of a request's full blocks, as far as they have been asked for: a plan asks for those of all that wait.

    The first one begins with the root, which is the same for all requests that may share blocks.
    """

    num_resets: int
    root: bytes
    keys: list[bytes] = field(default_factory=list)

    def find_key(self, request: Request, index: int, block_tokens: int) -> bytes:
        """Returns the key of a full block: a hash over its tokens and the key of the block before it."""
        keys = self.keys
        while len(keys) <= index:
            tokens = array("q", request.tokens_at(len(keys) * block_tokens, block_tokens))
            keys.append(hashlib.blake2b(tokens, digest_size=32, key=keys[-1] if keys else self.root).digest())
        return keys[index]


@dataclass(slots=True)
class _Holding:
    """What a request, or a session between requests, holds; the first `num_full` blocks are full of computed tokens."""

    chain: _Chain
    placement: Placement
    num_full: int


class BlockManager:
    """Hands out blocks 0 to `num_blocks - 1` and counts who holds each.

    A block is in one of three states: held by one or more requests and sessions; idle, if none holds it and its key is
    known; or free.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, *, caches_prefixes: bool, keeper: SessionKeeper | None = None
    ) -> None:
        """Starts with every block free; unless `caches_prefixes`, requests find only blocks of their own call."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.caches_prefixes = caches_prefixes
        self._keeper = keeper or SessionKeeper()
        self.num_evictions = 0
        self._held: dict[Request, _Holding] = {}
        # Those unused for longest come first.
        self._kept: dict[Session, _Holding] = {}
        # Of requests that may hold nothing yet, which end without a word to this manager.
        self._chains: WeakKeyDictionary[Request, _Chain] = WeakKeyDictionary()
        self._num_holders = [0] * num_blocks
        # The lowest is taken first, and what was freed last: it may still be in a processor's cache.
        self._free = list(reversed(range(num_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()
        # The two directions of one relation.
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold; a block that several share counts once."""
        if self._kept:
            return len(self._list_used())
        return self.num_blocks - len(self._free) - len(self._idle)

    def find_prefix(self, request: Request) -> int:
        """Counts the tokens at the beginning of a request that the cache holds: in whole blocks, or for its session.

        The newest token never counts, because a step has to compute it: its logits are what the request wants.
        """
        if request in self._held:
            return 0
        num_shared = len(self._match(request, request.num_tokens - 1)) * self.block_tokens
        return max(num_shared, self._count_kept(request))

    def will_find_more(self, request: Request, num_cached: int, other: Request) -> bool:
        """Tells whether another request has the same next block, and the same tokens before it."""
        index = num_cached // self.block_tokens
        end = num_cached + self.block_tokens
        if end >= request.num_tokens or end > other.num_tokens:
            return False
        if not (self._may_share(request) and self._may_share(other)):
            return False
        keys = [self._find_chain(one).find_key(one, index, self.block_tokens) for one in (request, other)]
        return keys[0] == keys[1]

    def reserve(self, request: Request, num_tokens: int, *, num_cached: int = 0) -> Placement | None:
        """Gives a request blocks for its next tokens; None if too few are free or idle."""
        holding = self._held.get(request)
        if holding is None:
            return self._begin(request, num_tokens, num_cached)
        assert not num_cached, f"{request.request_id} holds blocks already"
        num_missing = self._count_blocks(request.num_computed_tokens + num_tokens) - len(holding.placement.blocks)
        if num_missing > 0:
            if not self._has_room(num_missing):
                return None
            holding.placement = Placement(holding.placement.blocks + self._take(num_missing))
        return holding.placement

    def commit(self, request: Request) -> None:
        """Makes the full blocks of a request's computed tokens known by their keys, unless other blocks are."""
        if not self._may_share(request):
            return
        holding = self._held[request]
        num_full = request.num_computed_tokens // self.block_tokens
        for index in range(holding.num_full, num_full):
            key = holding.chain.find_key(request, index, self.block_tokens)
            block = holding.placement.blocks[index]
            if key not in self._blocks:
                self._blocks[key] = block
                self._keys[block] = key
        holding.num_full = num_full

    def release(self, request: Request) -> int:
        """Takes back the blocks of a request, if it holds any; returns how many it held."""
        holding = self._held.pop(request, None)
        if holding is None:
            return 0
        self._let_go(holding.placement.blocks)
        return len(holding.placement.blocks)

    def keep(self, request: Request) -> int:
        """Leaves the blocks of a request's computed tokens to its session, unless some are of before a reset."""
        holding = self._held.get(request)
        is_of_now = holding is not None and holding.chain.num_resets == self._keeper.num_resets
        session = self._keeper.note(request) if is_of_now else None
        if holding is None or session is None:
            return self.release(request)
        blocks, num_kept = holding.placement.blocks, self._count_blocks(len(session.token_ids))
        self._let_go(blocks[num_kept:])
        holding.placement = Placement(blocks[:num_kept])
        self._kept[session] = self._held.pop(request)
        return len(blocks)

    def forget(self, session: Session) -> None:
        """Gives up the blocks that a session keeps; those with keys are idle unless others hold them."""
        holding = self._kept.pop(session, None)
        if holding is not None:
            session.token_ids = []
            self._let_go(holding.placement.blocks)

    def erase(self, session: Session) -> list[int]:
        """Frees the blocks that a session keeps and nothing else holds, and forgets their keys; returns them."""
        holding = self._kept.get(session)
        self.forget(session)
        freed = [] if holding is None else [one for one in holding.placement.blocks if not self._num_holders[one]]
        for block in freed:
            if block in self._idle:
                del self._idle[block]
                del self._blocks[self._keys.pop(block)]
                self._free.append(block)
        return freed

    def reset(self) -> list[int]:
        """Forgets every key and what sessions keep, so that idle blocks are free; returns what became free."""
        erased = [block for session in list(self._kept) for block in self.erase(session)]
        idle = [*self._idle]
        self._idle.clear()
        self._free += idle
        self._blocks.clear()
        self._keys.clear()
        self._keeper.num_resets += 1
        return [*idle, *erased]

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Asserts that holders, states and keys of all blocks agree, and that only `requests` hold any."""
        holders: Counter[int] = Counter()
        for request, holding in self._held.items():
            assert request in requests, f"{request.request_id} holds blocks and does not run"
            assert request.session not in self._kept, f"{request.request_id} left blocks to its session"
            holders.update(self._check_holding(request.request_id, holding))
        for session, holding in self._kept.items():
            holders.update(self._check_holding(session.session_id, holding))
            num_needed, num_held = self._count_blocks(len(session.token_ids)), len(holding.placement.blocks)
            assert 0 < num_needed == num_held, f"{session.session_id} keeps {num_held} blocks and needs {num_needed}"
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
        session = request.session
        blocks: tuple[int, ...] = ()
        num_full = 0
        if num_cached and session is not None and num_cached <= self._count_kept(request):
            kept = self._kept[session]
            blocks = kept.placement.blocks[: self._count_blocks(num_cached)]
            num_full = min(kept.num_full, num_cached // self.block_tokens)
        elif num_cached:
            matched = self._match(request, num_cached)
            num_full = len(matched)
            assert num_full * self.block_tokens == num_cached, f"{num_cached} tokens of {request.request_id} are gone"
            blocks = tuple(matched)
        num_missing = self._count_blocks(num_cached + num_tokens) - len(blocks)
        if not self._has_room(num_missing, reused=blocks):
            return None
        for block in blocks:
            self._idle.pop(block, None)
            self._num_holders[block] += 1
        if session is not None:
            # What it does not take over, it will compute anew.
            self.forget(session)
        placement = Placement((*blocks, *self._take(num_missing)))
        self._held[request] = _Holding(self._find_chain(request), placement, num_full)
        return placement

    def _has_room(self, num_missing: int, *, reused: Collection[int] = ()) -> bool:
        """Tells whether enough blocks are neither held by requests nor among those that are about to be."""
        num_idle = sum([not self._num_holders[block] for block in reused])
        if num_missing <= len(self._free) + len(self._idle) - num_idle:
            return True
        return bool(self._kept) and num_missing <= self.num_blocks - len(self._list_used() | {*reused})

    def _list_used(self) -> set[int]:
        return {block for holding in self._held.values() for block in holding.placement.blocks}

    def _let_go(self, blocks: Sequence[int]) -> None:
        """Takes one holder off each of a sequence's blocks."""
        # The end of a sequence goes first: its beginning is what others may share.
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _check_holding(self, name: str, holding: _Holding) -> tuple[int, ...]:
        """Asserts that a sequence holds no block twice, and no block with others that is not full."""
        blocks = holding.placement.blocks
        assert len(set(blocks)) == len(blocks), f"{name} holds a block twice: {blocks}"
        for block in blocks[holding.num_full :]:
            assert self._num_holders[block] == 1, f"{name} shares block {block}, which is not full"
        return blocks

    def _count_kept(self, request: Request) -> int:
        """Counts the tokens behind which a request continues its session, and may write."""
        num_kept = 0 if request.session is None else self._keeper.count(request)
        if request.session is None or not num_kept:
            return 0
        if num_kept < self._kept[request.session].num_full * self.block_tokens:
            return num_kept // self.block_tokens * self.block_tokens
        return num_kept

    def _take(self, count: int) -> tuple[int, ...]:
        """Takes free blocks, then idle ones, then those of the sessions unused for longest; there must be enough."""
        while count > len(self._free) + len(self._idle):
            self.num_evictions += 1
            self.forget(choose_evicted(self._kept))
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

    def _may_share(self, request: Request) -> bool:
        """Tells whether a request may share blocks: with all requests of its root, or with its call's sequences."""
        return self.caches_prefixes or bool(request.call_key)

    def _match(self, request: Request, max_tokens: int) -> list[int]:
        """Finds the known blocks at the beginning of a request, in order, of at most `max_tokens` tokens."""
        matched: list[int] = []
        if not self._blocks or not self._may_share(request):
            return matched
        chain = self._find_chain(request)
        for index in range(max_tokens // self.block_tokens):
            block = self._blocks.get(chain.find_key(request, index, self.block_tokens))
            if block is None:
                break
            matched.append(block)
        return matched

    def _find_chain(self, request: Request) -> _Chain:
        """Returns a request's chain: one that holds blocks keeps it, others begin a new one after each reset."""
        holding = self._held.get(request)
        if holding is not None:
            return holding.chain
        chain = self._chains.get(request)
        if chain is None or chain.num_resets != self._keeper.num_resets:
            root = self._keeper.find_prefix_root(request, b"" if self.caches_prefixes else request.call_key)
            chain = self._chains[request] = _Chain(self._keeper.num_resets, root)
        return chain

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)
