"""Blocks that requests share, by hand; test_block_machine.py moves them at random."""

from __future__ import annotations

import pytest

from bundle.abi.inputs import PromptLengths
from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.kept_sequences import SessionKeeper
from runtime_svc.engine.request import Request
from tests.ranks.scheduling import make_request


def make_kv(num_blocks: int = 8, *, caches_prefixes: bool = True) -> BlockManager:
    """Blocks of 4 tokens."""
    return BlockManager(num_blocks, 4, caches_prefixes=caches_prefixes)


def compute(kv: BlockManager, request: Request) -> tuple[int, ...]:
    """Computes what the cache does not hold of a request; returns its blocks."""
    num_cached = kv.find_prefix(request)
    placement = kv.reserve(request, request.num_tokens - num_cached, num_cached=num_cached)
    assert placement is not None
    request.num_computed_tokens = request.num_tokens
    kv.commit(request)
    return placement.blocks


def test_running_requests_share_whole_blocks_without_a_copy() -> None:
    kv = make_kv()
    first, second = make_request("r", range(10)), make_request("r", [*range(9), 50, 51])
    assert compute(kv, first) == (0, 1, 2)
    assert kv.find_prefix(second) == 8
    assert compute(kv, second) == (0, 1, 3)
    assert kv.num_used_blocks == 4
    kv.release(first)
    assert kv.num_used_blocks == 3, "what the second one holds stays"
    kv.check_integrity([second])


def test_the_newest_token_is_always_computed() -> None:
    kv, request = make_kv(), make_request("r", range(8))
    compute(kv, request)
    assert kv.find_prefix(make_request("r", range(8))) == 4
    assert kv.find_prefix(make_request("r", range(9))) == 8


def test_a_block_is_known_once_it_is_full_of_computed_tokens() -> None:
    kv, request, other = make_kv(), make_request("r", range(9)), make_request("r", range(9))
    kv.reserve(request, 9)
    assert kv.find_prefix(other) == 0, "planned, not computed"
    request.num_computed_tokens = 7
    kv.commit(request)
    assert kv.find_prefix(other) == 4


def test_equal_blocks_behind_other_beginnings_are_others() -> None:
    kv = make_kv()
    compute(kv, make_request("r", [1, 1, 1, 1, 5, 5, 5, 5, 9]))
    assert kv.find_prefix(make_request("r", [5, 5, 5, 5, 9])) == 0
    assert kv.find_prefix(make_request("r", [2, 2, 2, 2, 5, 5, 5, 5, 9])) == 0


@pytest.mark.parametrize(("each", "found"), [(False, [0, 8, 0, 8]), (True, [0, 8, 0, 0])])
def test_prompts_whose_lengths_give_other_keys_share_nothing(each: bool, found: list[int]) -> None:
    """Of 9 and 11, 13 and 14 tokens that begin alike; beyond 12 frequencies are others."""
    lengths = PromptLengths(limit=12, each=each)
    kv = BlockManager(20, 4, caches_prefixes=True, keeper=SessionKeeper(prompt_lengths=lengths))
    cached = []
    for num_tokens in (9, 11, 13, 14):
        request = make_request("r", [*range(8), *[60 + num_tokens] * (num_tokens - 8)])
        cached.append(kv.find_prefix(request))
        compute(kv, request)
    assert cached == found


def test_the_blocks_unused_for_longest_are_evicted_the_end_of_a_sequence_first() -> None:
    kv = make_kv(5)
    old, new = make_request("r", [1] * 8), make_request("r", [2] * 8)
    for request in (old, new):
        compute(kv, request)
    kv.release(old)
    kv.release(new)
    compute(kv, make_request("r", [3] * 8))
    assert kv.find_prefix(make_request("r", [1] * 9)) == 4, "one block was free, and its second one made room"
    assert kv.find_prefix(make_request("r", [2] * 9)) == 8


def test_what_is_shared_does_not_count_as_room() -> None:
    kv = make_kv(2)
    first = make_request("r", range(8))
    compute(kv, first)
    kv.release(first)
    longer = make_request("r", [*range(8), 9])
    assert kv.find_prefix(longer) == 8
    assert kv.reserve(longer, 1, num_cached=8) is None, "its own prefix is all that could make room"
    assert kv.find_prefix(longer) == 8, "nothing has changed"
    assert kv.reserve(longer, 4, num_cached=4) is not None
    kv.check_integrity([longer])


def test_nothing_that_was_computed_before_a_reset_is_found_after_it() -> None:
    kv = make_kv()
    ended, running = make_request("r", range(8)), make_request("r", [*range(4), 7, 7, 7])
    compute(kv, ended)
    compute(kv, running)
    kv.release(ended)
    assert kv.reset() == [1], "the first block is the running request's, too"
    assert kv.find_prefix(make_request("r", range(9))) == 0
    running.output_token_ids.append(7)
    kv.reserve(running, 1)
    running.num_computed_tokens = 8
    kv.commit(running)
    assert kv.find_prefix(make_request("r", [*range(4), 7, 7, 7, 7, 9])) == 0, "its beginning is of before"
    kv.check_integrity([running])


def test_a_request_that_waits_over_a_reset_finds_what_is_computed_after_it() -> None:
    kv, waiting = make_kv(), make_request("r", range(9))
    before, after = make_request("r", range(9)), make_request("r", range(9))
    compute(kv, before)
    assert kv.find_prefix(waiting) == 8
    kv.reset()
    assert kv.find_prefix(waiting) == 0
    assert not kv.will_find_more(waiting, 0, before), "what runs over a reset shares with none that starts after it"
    assert kv.will_find_more(waiting, 0, after)
    compute(kv, after)
    assert kv.find_prefix(waiting) == 8
