"""The KV managers at random, beside a cache that they are the managers of: what a request computed is what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.request import Adapter, Request, Session
from tests.ranks.scheduling import make_request

#: Owner, salt and digest of the adapter of a request.
Share = tuple[str, str, str | None]
PLAIN: Share = ("", "", None)
SHARES: list[Share] = [
    *(PLAIN, PLAIN, PLAIN),
    *(("", "own", None), ("bob", "", None), ("bob", "own", "1")),
    *(("", "", "1"), ("", "", "2")),
]

#: What the cache holds for a token: whatever its keys and values depend on.
Content = tuple[int, Share, tuple[int, ...]]

MAX_TOKENS = 20
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS)
CHOICE = st.integers(0, 100)
#: Sessions by name; most requests have none.
SESSION = st.sampled_from(["", "", "a", "b", "c"])


def share_of(request: Request) -> Share:
    return request.owner, request.cache_salt, request.adapter_digest


class BlockMachine(RuleBasedStateMachine):
    """Every move of the scheduler in any order, over tokens of two kinds, so that sequences often begin alike."""

    kv: BlockManager | SlotManager

    @initialize(num_blocks=st.integers(7, 16), block_tokens=st.integers(1, 4), caches_prefixes=st.booleans())
    def start(self, num_blocks: int, block_tokens: int, caches_prefixes: bool) -> None:
        self.begin_with(BlockManager(num_blocks, block_tokens, caches_prefixes=caches_prefixes), caches_prefixes)

    def begin_with(self, kv: BlockManager | SlotManager, caches_prefixes: bool) -> None:
        self.kv = kv
        self.caches_prefixes = caches_prefixes
        self.sessions = {name: Session("caller", name, 60.0, 0.0) for name in "abc"}
        self.cache: dict[tuple[int, int], Content] = {}
        self.num_resets = 0
        #: Requests that hold blocks, with the number of resets before they began to.
        self.holders: dict[Request, int] = {}
        self.preempted: list[Request] = []
        self.num_requests = 0
        #: By session, what the request had that left it what is kept.
        self.shares: dict[str, Share] = {}

    @rule(tokens=TOKENS, share=st.sampled_from(SHARES), session=SESSION, is_computed=st.booleans())
    def allocate(self, tokens: list[int], share: Share, session: str, is_computed: bool) -> None:
        self.begin(self.make_request(tokens, share, session), is_computed=is_computed)

    @precondition(lambda self: self.kv._kept)
    @rule(choice=CHOICE, length=st.integers(1, MAX_TOKENS), tail=TOKENS, is_computed=st.booleans())
    def continue_session(self, choice: int, length: int, tail: list[int], is_computed: bool) -> None:
        """A request begins as its session ended, or leaves it on the way."""
        session = list(self.kv._kept)[choice % len(self.kv._kept)]
        tokens = [*session.token_ids[:length], *tail][:MAX_TOKENS]
        num_common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(session.token_ids, tokens, strict=False))])
        request = self.make_request(tokens, self.shares[session.session_id], session.session_id)
        num_kept = min(num_common, len(tokens) - 1)
        found = self.kv.find_prefix(request)
        # A full block with a key is never written again.
        assert num_kept // self.kv.block_tokens * self.kv.block_tokens <= found
        assert found >= num_kept or self.caches_prefixes
        self.begin(request, is_computed=is_computed)

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE, is_cancelled=st.booleans())
    def keep(self, choice: int, is_cancelled: bool) -> None:
        """A request ends and leaves its part to its session, while a step writes behind what is computed, or not."""
        request = self.choose(choice)
        blocks = self.blocks_of(request)
        if is_cancelled:
            for position in range(request.num_computed_tokens, len(blocks) * self.kv.block_tokens):
                self.cache[self.find_place(blocks, position)] = (-1, PLAIN, ())
        assert self.kv.keep(request) == len(blocks)
        is_kept = request.session in self.kv._kept
        is_of_now = self.holders.pop(request) == self.num_resets
        assert is_kept is (request.session is not None and is_of_now and request.num_computed_tokens > 0)
        if request.session is not None:
            self.shares[request.session.session_id] = share_of(request)
        self.leave(request)

    @rule(name=st.sampled_from("abc"), is_erased=st.booleans())
    def forget(self, name: str, is_erased: bool) -> None:
        """A session loses what is kept for it; if it is erased, its part of the cache is overwritten."""
        if is_erased:
            for block in self.kv.erase(self.sessions[name]):
                for position in range(self.kv.block_tokens):
                    self.cache[block, position] = (-2, PLAIN, ())
        else:
            self.kv.forget(self.sessions[name])
        assert not self.sessions[name].token_ids

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE, count=st.integers(1, MAX_TOKENS))
    def extend(self, choice: int, count: int) -> None:
        request = self.choose(choice)
        self.compute(request, min(count, request.num_tokens - request.num_computed_tokens))

    @precondition(lambda self: self.holders)
    @rule(
        choice=CHOICE,
        length=st.integers(1, MAX_TOKENS),
        tail=TOKENS,
        is_computed=st.booleans(),
        is_of_call=st.booleans(),
    )
    def fork(self, choice: int, length: int, tail: list[int], is_computed: bool, is_of_call: bool) -> None:
        """A request begins as one that runs, and may be of the same call."""
        parent = self.choose(choice)
        tokens = [*parent.tokens_at(0, min(length, parent.num_tokens)), *tail][:MAX_TOKENS]
        request = self.make_request(tokens, share_of(parent))
        request.call_key = parent.call_key if is_of_call else b""
        self.begin(request, is_computed=is_computed)

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE)
    def free(self, choice: int) -> None:
        self.drop(self.choose(choice))

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE)
    def preempt(self, choice: int) -> None:
        request = self.choose(choice)
        self.kv.release(request)
        del self.holders[request]
        request.num_computed_tokens = 0
        self.preempted.append(request)

    @rule(num_blocks=st.integers(1, 20))
    def evict(self, num_blocks: int) -> None:
        """A request of other tokens takes blocks that no other holds, and ends."""
        request = self.make_request([2] * num_blocks * self.kv.block_tokens, SHARES[0])
        if self.kv.reserve(request, request.num_tokens) is None:
            assert num_blocks > self.count_available()
        else:
            self.kv.check_integrity([*self.holders, request])
            self.kv.release(request)

    @precondition(lambda self: self.preempted)
    @rule()
    def recompute(self) -> None:
        request = self.preempted.pop()
        assert request.session is None or request.session.user is request
        self.begin(request, is_computed=True)

    @precondition(lambda self: self.num_requests % 4 == 3)
    @rule()
    def reset(self) -> None:
        idle = self.kv.reset()
        held = {block for request in self.holders for block in self.blocks_of(request)}
        assert held.isdisjoint(idle)
        assert not self.kv._kept
        self.num_resets += 1

    @invariant()
    def nothing_is_lost_and_everyone_reads_what_it_computed(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity(self.holders)
        for request in self.holders:
            blocks = self.blocks_of(request)
            for position in range(request.num_computed_tokens):
                assert self.cache[self.find_place(blocks, position)] == self.expect(request, position)
        for session, kept in self.kv._kept.items():
            blocks = (kept if isinstance(kept, Placement) else kept.placement).blocks
            for position in range(len(session.token_ids)):
                expected = self.num_resets, self.shares[session.session_id], tuple(session.token_ids[: position + 1])
                assert self.cache[self.find_place(blocks, position)] == expected

    def begin(self, request: Request, *, is_computed: bool) -> None:
        """A request starts; a step computes all that it lacks if `is_computed`."""
        num_cached = self.kv.find_prefix(request)
        assert num_cached % self.kv.block_tokens == 0 or request.session in self.kv._kept
        assert num_cached < request.num_tokens
        assert num_cached >= self.count_shared(request), "what a running request has computed can be shared"
        if not self.may_share(request) and request.session not in self.kv._kept:
            assert not num_cached
        count = request.num_tokens - num_cached
        placement = self.kv.reserve(request, count, num_cached=num_cached)
        if placement is None:
            assert self.count_blocks(request.num_tokens) > self.count_available()
            assert self.kv.find_prefix(request) == num_cached, "nothing has changed"
            self.leave(request)
            return
        self.holders[request] = self.num_resets
        request.num_computed_tokens = num_cached
        if is_computed:
            self.compute(request, count)

    def compute(self, request: Request, count: int) -> None:
        """A step computes some of the tokens that a request lacks; behind all of them it gives a new one."""
        placement = self.kv.reserve(request, count)
        if placement is None:
            num_needed = self.count_blocks(request.num_computed_tokens + count) - len(self.blocks_of(request))
            assert num_needed > self.count_available()
            return
        for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
            self.cache[self.find_place(placement.blocks, position)] = self.expect(request, position)
        request.num_computed_tokens += count
        self.kv.commit(request)
        if request.num_computed_tokens == request.num_tokens:
            request.output_token_ids.append(request.num_tokens % 2)
        if request.num_tokens > MAX_TOKENS:
            self.drop(request)

    def drop(self, request: Request) -> None:
        self.kv.release(request)
        del self.holders[request]
        self.leave(request)

    def leave(self, request: Request) -> None:
        if request.session is not None:
            request.session.user = None

    def choose(self, choice: int) -> Request:
        return list(self.holders)[choice % len(self.holders)]

    def make_request(self, tokens: Sequence[int], share: Share, name_of_session: str = "") -> Request:
        """A request, of the session if that is idle."""
        self.num_requests += 1
        name = f"{self.num_requests}"
        # Some are sequences of calls that want several; later ones join them.
        key = name.encode() if self.num_requests % 2 and not name_of_session else b""
        owner, salt, digest = share
        adapter = None if digest is None else Adapter("name", digest)
        request = make_request(name, tokens, owner=owner, cache_salt=salt, adapter=adapter, call_key=key)
        session = self.sessions.get(name_of_session)
        if session is not None and session.user is None:
            request.session, session.user = session, request
        return request

    def expect(self, request: Request, position: int) -> Content:
        return self.holders[request], share_of(request), tuple(request.tokens_at(0, position + 1))

    def blocks_of(self, request: Request) -> tuple[int, ...]:
        held = self.kv._held[request]
        return (held if isinstance(held, Placement) else held.placement).blocks

    def find_place(self, blocks: Sequence[int], position: int) -> tuple[int, int]:
        return blocks[position // self.kv.block_tokens], position % self.kv.block_tokens

    def count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.kv.block_tokens)

    def is_known(self, block: int) -> bool:
        return isinstance(self.kv, BlockManager) and block in self.kv._keys

    def count_available(self) -> int:
        return self.kv.num_blocks - len({block for request in self.holders for block in self.blocks_of(request)})

    def may_share(self, request: Request) -> bool:
        return isinstance(self.kv, BlockManager) and (self.caches_prefixes or bool(request.call_key))

    def find_share(self, request: Request) -> Share | bytes:
        """What requests that share blocks have in common."""
        return share_of(request) if self.caches_prefixes else request.call_key

    def count_shared(self, request: Request) -> int:
        """Tokens, in whole blocks, that a request has in common with what one that runs has computed.

        Blocks that were full when others with the same tokens were known already do not count: no key leads to them.
        """
        longest = 0
        for other, num_resets in self.holders.items():
            is_of_now = num_resets == self.num_resets
            if is_of_now and self.may_share(request) and self.find_share(other) == self.find_share(request):
                known = takewhile(self.is_known, self.blocks_of(other))
                num_known = min(other.num_computed_tokens, len(list(known)) * self.kv.block_tokens)
                pairs = zip(other.tokens_at(0, num_known), request.tokens_at(0, request.num_tokens - 1), strict=False)
                longest = max(longest, len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
        return longest // self.kv.block_tokens * self.kv.block_tokens


class SlotMachine(BlockMachine):
    """The same moves over slots, which hold any sequence whole."""

    @initialize(num_slots=st.integers(1, 4))
    def start(self, num_slots: int) -> None:
        self.begin_with(SlotManager(num_slots, MAX_TOKENS + 1), False)

    def count_blocks(self, num_tokens: int) -> int:
        return min(num_tokens, 1)


class TestSlotMachine(SlotMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class TestBlockMachine(BlockMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_block_machine_at_length() -> None:
    """100 000 moves, and the integrity of all blocks after each."""
    counted = {"moves": 0}

    class Machine(BlockMachine):
        @invariant()
        def count(self) -> None:
            counted["moves"] += 1

    length = settings(max_examples=2_500, stateful_step_count=60, deadline=None, database=None)
    run_state_machine_as_test(Machine, settings=length)
    print(f"{counted['moves']} moves")  # noqa: T201
    assert counted["moves"] >= 100_000
