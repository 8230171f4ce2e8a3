"""Behaviour of every KV manager. Derive a test class, and give it `make_kv`."""

from __future__ import annotations

import random

import pytest

from runtime_svc.engine.kv.manager import KvManager, Placement
from runtime_svc.engine.request import Request, SamplingParams, StopConditions, Timeline

#: What `make_kv` has room for: so many requests of so many tokens, and no more.
NUM_REQUESTS = 3
NUM_TOKENS = 8


def make_request(name: str) -> Request:
    return Request(name, (5,) * NUM_TOKENS, SamplingParams(0.0, 0, 1.0, 0), StopConditions(9), Timeline(0.0))


def reserve(kv: KvManager, request: Request, num_tokens: int) -> Placement:
    placement = kv.reserve(request, num_tokens)
    assert placement is not None
    return placement


def fill(kv: KvManager) -> list[Request]:
    """Gives all room away."""
    requests = [make_request(f"{index}") for index in range(NUM_REQUESTS)]
    for request in requests:
        reserve(kv, request, NUM_TOKENS)
    return requests


class KvManagerSuite:
    def make_kv(self) -> KvManager:
        """An empty cache for NUM_REQUESTS requests of NUM_TOKENS tokens."""
        raise NotImplementedError

    def test_what_a_request_holds_stays_as_it_grows(self) -> None:
        kv, request = self.make_kv(), make_request("a")
        placement = reserve(kv, request, 1)
        for num_computed in range(1, NUM_TOKENS):
            request.num_computed_tokens = num_computed
            kv.check_integrity([request])
            grown = reserve(kv, request, 1)
            assert grown.blocks[: len(placement.blocks)] == placement.blocks
            placement = grown

    def test_reserving_the_same_again_changes_nothing(self) -> None:
        kv, request = self.make_kv(), make_request("a")
        placement = reserve(kv, request, NUM_TOKENS)
        assert kv.reserve(request, NUM_TOKENS) == placement
        assert kv.reserve(request, 1) == placement
        kv.check_integrity([request])

    def test_all_room_can_be_given_and_each_part_once(self) -> None:
        kv = self.make_kv()
        requests = fill(kv)
        kv.check_integrity(requests)
        blocks = [block for request in requests for block in reserve(kv, request, 1).blocks]
        assert len(blocks) == len(set(blocks))

    def test_no_room_changes_nothing_until_a_request_ends(self) -> None:
        kv = self.make_kv()
        requests, late = fill(kv), make_request("late")
        before = [kv.reserve(request, 1) for request in requests]
        assert kv.reserve(late, 1) is None
        kv.check_integrity(requests)
        assert [kv.reserve(request, 1) for request in requests] == before
        kv.release(requests[1])
        reserve(kv, late, NUM_TOKENS)
        kv.check_integrity([requests[0], late, requests[2]])

    def test_releasing_twice_does_nothing(self) -> None:
        kv, request = self.make_kv(), make_request("a")
        kv.release(request)
        reserve(kv, request, NUM_TOKENS)
        kv.release(request)
        kv.release(request)
        kv.check_integrity([])
        kv.check_integrity(fill(kv))

    def test_blocks_are_counted(self) -> None:
        kv = self.make_kv()
        assert kv.num_used_blocks == 0
        assert kv.num_blocks * kv.block_tokens >= NUM_REQUESTS * NUM_TOKENS
        requests = fill(kv)
        held = [len(reserve(kv, request, 1).blocks) for request in requests]
        assert kv.num_used_blocks == sum(held) <= kv.num_blocks
        assert [kv.release(request) for request in requests] == held
        assert kv.release(requests[0]) == 0
        assert kv.num_used_blocks == 0

    def test_reset_leaves_requests_what_they_hold(self) -> None:
        kv, request = self.make_kv(), make_request("a")
        placement = reserve(kv, request, 3)
        request.num_computed_tokens = 3
        kv.reset()
        kv.check_integrity([request])
        assert reserve(kv, request, 1).blocks[: len(placement.blocks)] == placement.blocks

    def test_integrity_notices_a_request_that_ended_and_holds(self) -> None:
        kv, request = self.make_kv(), make_request("ended")
        reserve(kv, request, 1)
        with pytest.raises(AssertionError, match="ended"):
            kv.check_integrity([])

    def test_integrity_notices_computed_tokens_without_room(self) -> None:
        kv, request = self.make_kv(), make_request("lost")
        reserve(kv, request, 1)
        request.num_computed_tokens = 1
        kv.release(request)
        with pytest.raises(AssertionError, match="lost"):
            kv.check_integrity([request])

    @pytest.mark.parametrize("seed", range(20))
    def test_nothing_is_lost_or_shared_whatever_happens(self, seed: int) -> None:
        """Each move makes a request grow by some tokens, or ends it if the number is 0."""
        source = random.Random(seed)
        moves = [(source.randint(0, NUM_REQUESTS), source.randint(0, NUM_TOKENS)) for _ in range(40)]
        kv, requests = self.make_kv(), [make_request(f"{index}") for index in range(NUM_REQUESTS + 1)]
        held: dict[Request, Placement] = {}
        for index, num_tokens in moves:
            request = requests[index]
            if not num_tokens:
                kv.release(request)
                held.pop(request, None)
                request.num_computed_tokens = 0
            elif request.num_computed_tokens + num_tokens <= NUM_TOKENS:
                placement = kv.reserve(request, num_tokens)
                if placement is not None:
                    held[request] = placement
                    request.num_computed_tokens += num_tokens
            kv.check_integrity(list(held))
            blocks = [block for placement in held.values() for block in placement.blocks]
            assert len(blocks) == len(set(blocks))
        for request in requests:
            kv.release(request)
        kv.check_integrity([])
        fill(kv)
