"""The block manager at random, beside a cache that it is the manager of: what a request computed is what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.request import Request, SamplingParams, StopConditions, Timeline

#: What the cache holds for a token: whatever its keys and values depend on.
Content = tuple[int, str, tuple[int, ...]]

MAX_TOKENS = 20
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS)
CHOICE = st.integers(0, 100)


class BlockMachine(RuleBasedStateMachine):
    """Every move of the scheduler in any order, over tokens of two kinds, so that sequences often begin alike."""

    @initialize(num_blocks=st.integers(7, 16), block_tokens=st.integers(1, 4), caches_prefixes=st.booleans())
    def start(self, num_blocks: int, block_tokens: int, caches_prefixes: bool) -> None:
        self.kv = BlockManager(num_blocks, block_tokens, caches_prefixes=caches_prefixes)
        self.caches_prefixes = caches_prefixes
        self.cache: dict[tuple[int, int], Content] = {}
        self.num_resets = 0
        #: Requests that hold blocks, with the number of resets before they began to.
        self.holders: dict[Request, int] = {}
        self.preempted: list[Request] = []
        self.num_requests = 0

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "", "own"]), is_computed=st.booleans())
    def allocate(self, tokens: list[int], salt: str, is_computed: bool) -> None:
        self.begin(self.make_request(tokens, salt), is_computed=is_computed)

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE, count=st.integers(1, MAX_TOKENS))
    def extend(self, choice: int, count: int) -> None:
        request = self.choose(choice)
        self.compute(request, min(count, request.num_tokens - request.num_computed_tokens))

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE, length=st.integers(1, MAX_TOKENS), tail=TOKENS, is_computed=st.booleans())
    def fork(self, choice: int, length: int, tail: list[int], is_computed: bool) -> None:
        """A request begins as one that runs."""
        parent = self.choose(choice)
        tokens = [*parent.tokens_at(0, min(length, parent.num_tokens)), *tail][:MAX_TOKENS]
        self.begin(self.make_request(tokens, parent.cache_salt), is_computed=is_computed)

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE)
    def free(self, choice: int) -> None:
        self.drop(self.choose(choice))

    @precondition(lambda self: self.holders)
    @rule(choice=CHOICE)
    def preempt(self, choice: int) -> None:
        request = self.choose(choice)
        self.drop(request)
        request.num_computed_tokens = 0
        self.preempted.append(request)

    @rule(num_blocks=st.integers(1, 20))
    def evict(self, num_blocks: int) -> None:
        """A request of other tokens takes blocks that no other holds, and ends."""
        request = self.make_request([2] * num_blocks * self.kv.block_tokens, "")
        if self.kv.reserve(request, request.num_tokens) is None:
            assert num_blocks > self.count_available()
        else:
            self.kv.check_integrity([*self.holders, request])
            self.kv.release(request)

    @precondition(lambda self: self.preempted)
    @rule()
    def recompute(self) -> None:
        self.begin(self.preempted.pop(), is_computed=True)

    @precondition(lambda self: self.num_requests % 4 == 3)
    @rule()
    def reset(self) -> None:
        idle = self.kv.reset()
        held = {block for request in self.holders for block in self.blocks_of(request)}
        assert held.isdisjoint(idle)
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

    def begin(self, request: Request, *, is_computed: bool) -> None:
        """A request starts; a step computes all that it lacks if `is_computed`."""
        num_cached = self.kv.find_prefix(request)
        assert num_cached % self.kv.block_tokens == 0
        assert num_cached < request.num_tokens
        assert num_cached >= self.count_shared(request), "what a running request has computed can be shared"
        if not self.caches_prefixes:
            assert not num_cached
        count = request.num_tokens - num_cached
        placement = self.kv.reserve(request, count, num_cached=num_cached)
        if placement is None:
            assert self.count_blocks(request.num_tokens) > self.count_available()
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

    def choose(self, choice: int) -> Request:
        return list(self.holders)[choice % len(self.holders)]

    def make_request(self, tokens: Sequence[int], salt: str) -> Request:
        self.num_requests += 1
        sampling, stop = SamplingParams(0.0, 0, 1.0, 0), StopConditions(2 * MAX_TOKENS)
        name = f"{self.num_requests}"
        return Request(name, tuple(tokens), sampling, stop, Timeline(0.0), cache_salt=salt)

    def expect(self, request: Request, position: int) -> Content:
        return self.holders[request], request.cache_salt, tuple(request.tokens_at(0, position + 1))

    def blocks_of(self, request: Request) -> tuple[int, ...]:
        return self.kv._held[request].placement.blocks

    def find_place(self, blocks: Sequence[int], position: int) -> tuple[int, int]:
        return blocks[position // self.kv.block_tokens], position % self.kv.block_tokens

    def count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.kv.block_tokens)

    def count_available(self) -> int:
        return self.kv.num_blocks - len({block for request in self.holders for block in self.blocks_of(request)})

    def count_shared(self, request: Request) -> int:
        """Tokens, in whole blocks, that a request has in common with what one that runs has computed.

        Blocks that were full when others with the same tokens were known already do not count: no key leads to them.
        """
        longest = 0
        for other, num_resets in self.holders.items():
            if self.caches_prefixes and num_resets == self.num_resets and other.cache_salt == request.cache_salt:
                known = takewhile(lambda block: block in self.kv._keys, self.blocks_of(other))
                num_known = min(other.num_computed_tokens, len(list(known)) * self.kv.block_tokens)
                pairs = zip(other.tokens_at(0, num_known), request.tokens_at(0, request.num_tokens - 1), strict=False)
                longest = max(longest, len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
        return longest // self.kv.block_tokens * self.kv.block_tokens


class TestBlockMachine(BlockMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestBlockMachineAtLength(BlockMachine.TestCase):
    """At least 100 000 moves."""

    settings = settings(max_examples=2_000, stateful_step_count=60, deadline=None)
