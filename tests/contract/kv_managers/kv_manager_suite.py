"""Behaviour of every KV manager. Derive a test class, and give it `make_kv`."""

from __future__ import annotations

import pytest

from runtime_svc.engine.kv.manager import KvManager, Placement
from runtime_svc.engine.request import Adapter, Request, Session
from tests.ranks import scheduling

#: What `make_kv` has room for: so many requests of so many tokens, and no more.
NUM_REQUESTS = 3
NUM_TOKENS = 8


def make_request(name: str, session: Session | None = None, *, tokens: tuple[int, ...] = (5,) * NUM_TOKENS) -> Request:
    return scheduling.make_request(name, tokens, session=session)


def make_session(name: str) -> Session:
    return Session("caller", name, 60.0, 0.0)


def run_and_keep(
    kv: KvManager, session: Session, num_tokens: int, *, token: int = 5, adapter: Adapter | None = None
) -> tuple[int, ...]:
    """A request of a session computes tokens and ends; returns the blocks that it held."""
    request = make_request(f"of {session.session_id}", session, tokens=(token,) * NUM_TOKENS)
    request.adapter = adapter
    num_cached = kv.find_prefix(request)
    placement = kv.reserve(request, num_tokens - num_cached, num_cached=num_cached)
    assert placement is not None
    request.num_computed_tokens = num_tokens
    kv.commit(request)
    assert kv.keep(request) == len(placement.blocks)
    kv.check_integrity([])
    return placement.blocks


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
    #: Tokens of NUM_TOKENS that the sequences of a call have of the first one; and whether others have them, too.
    num_call_shares = 0
    shares_with_all = False

    def make_kv(self) -> KvManager:
        """An empty cache for NUM_REQUESTS requests of NUM_TOKENS tokens."""
        raise NotImplementedError

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

    @pytest.mark.parametrize("num_kept", [1, 5, 6, NUM_TOKENS - 1])
    def test_a_session_continues_behind_all_that_its_last_request_computed(self, num_kept: int) -> None:
        kv, session = self.make_kv(), make_session("s")
        blocks = run_and_keep(kv, session, num_kept)
        assert kv.num_used_blocks == 0, "no request holds any"
        request = make_request("next", session)
        assert kv.find_prefix(request) == num_kept
        placement = kv.reserve(request, NUM_TOKENS - num_kept, num_cached=num_kept)
        assert placement is not None
        assert placement.blocks[: len(blocks)] == blocks
        request.num_computed_tokens = NUM_TOKENS
        kv.check_integrity([request])
        assert kv.find_prefix(request) == 0, "it holds them now"

    def test_the_newest_token_of_a_request_is_computed_always(self) -> None:
        kv, session = self.make_kv(), make_session("s")
        run_and_keep(kv, session, NUM_TOKENS - 1)
        assert kv.find_prefix(make_request("shorter", session, tokens=(5, 5))) <= 1

    def test_a_session_goes_on_where_its_request_leaves_what_is_kept(self) -> None:
        kv, session = self.make_kv(), make_session("s")
        run_and_keep(kv, session, 7)
        request = make_request("other", session, tokens=(5, 5, 5, 5, 5, 9, 9, 9))
        num_cached = kv.find_prefix(request)
        assert num_cached in {4, 5}, "a full block with a key is not written again"
        assert kv.reserve(request, 8 - num_cached, num_cached=num_cached) is not None
        request.num_computed_tokens = 8
        kv.check_integrity([request])
        assert kv.find_prefix(make_request("none in common", make_session("t"), tokens=(9, 5))) == 0

    def test_a_session_may_begin_anew(self) -> None:
        kv, session = self.make_kv(), make_session("s")
        run_and_keep(kv, session, NUM_TOKENS - 1)
        request = make_request("anew", session)
        assert kv.reserve(request, NUM_TOKENS) is not None
        assert not session.token_ids
        kv.check_integrity([request])

    def test_what_sessions_keep_makes_room_those_unused_for_longest_first(self) -> None:
        kv, sessions = self.make_kv(), [make_session(name) for name in "abc"]
        for token, session in enumerate(sessions):
            run_and_keep(kv, session, NUM_TOKENS - 1, token=token)
        run_and_keep(kv, sessions[0], NUM_TOKENS - 1, token=0)
        assert kv.num_evictions == 0
        requests = [make_request("x")]
        reserve(kv, requests[0], NUM_TOKENS)
        assert [bool(session.token_ids) for session in sessions] == [True, False, True]
        assert kv.num_evictions == 1
        # A request of it waits.
        sessions[2].user = make_request("waits", sessions[2])
        requests.append(make_request("y"))
        reserve(kv, requests[1], NUM_TOKENS)
        assert [bool(session.token_ids) for session in sessions] == [False, False, True]
        requests.append(make_request("z"))
        for request in requests[1:]:
            reserve(kv, request, NUM_TOKENS)
        kv.check_integrity(requests)
        assert kv.reserve(make_request("late"), 1) is None

    def test_what_is_forgotten_is_free(self) -> None:
        kv, session = self.make_kv(), make_session("s")
        blocks = run_and_keep(kv, session, NUM_TOKENS - 1)
        assert sorted(kv.erase(session)) == sorted(blocks)
        assert kv.erase(session) == []
        assert not session.token_ids
        kv.check_integrity([])
        assert kv.find_prefix(make_request("anybody")) == 0, "erased blocks may be overwritten"
        run_and_keep(kv, session, NUM_TOKENS - 1)
        kv.forget(session)
        assert not session.token_ids
        kv.check_integrity([])
        kv.check_integrity(fill(kv))

    def test_a_reset_forgets_what_sessions_keep_also_of_requests_that_run_over_it(self) -> None:
        kv, session, other = self.make_kv(), make_session("s"), make_session("t")
        blocks = run_and_keep(kv, session, 3)
        request = make_request("runs", other)
        reserve(kv, request, 3)
        request.num_computed_tokens = 3
        assert set(blocks) <= set(kv.reset())
        kv.check_integrity([request])
        kv.keep(request)
        assert not session.token_ids
        assert not other.token_ids, "its numbers are of before the reset"
        kv.check_integrity([])

    def test_requests_with_another_salt_do_not_continue_a_session(self) -> None:
        kv, session = self.make_kv(), make_session("s")
        run_and_keep(kv, session, 5)
        request = make_request("salted", session)
        request.cache_salt = "own"
        assert kv.find_prefix(request) == 0

    def test_a_session_is_continued_with_the_bytes_of_one_adapter(self) -> None:
        kv, session = self.make_kv(), make_session("s")
        run_and_keep(kv, session, 5, adapter=Adapter("a", "old"))
        found = []
        for adapter in (Adapter("b", "old"), Adapter("a", "new"), None):
            request = make_request("next", session)
            request.adapter = adapter
            found.append(kv.find_prefix(request))
        assert found == [5, 0, 0], "a name is nothing that numbers depend on"

    def test_sequences_of_a_call_give_back_what_they_share_one_by_one(self) -> None:
        kv = self.make_kv()
        sequences = make_request("call").fan_out(3)
        for number, request in enumerate(sequences):
            num_cached = kv.find_prefix(request)
            assert num_cached == (self.num_call_shares if number else 0)
            assert kv.reserve(request, NUM_TOKENS - num_cached, num_cached=num_cached) is not None
            assert kv.will_find_more(make_request("other"), 0, request) is self.shares_with_all
            request.num_computed_tokens = NUM_TOKENS
            kv.commit(request)
            kv.check_integrity(sequences)
        assert kv.find_prefix(make_request("other")) == (self.num_call_shares if self.shares_with_all else 0)
        for number, request in enumerate(sequences, 1):
            kv.release(request)
            kv.check_integrity(sequences[number:])
            request.num_computed_tokens = 0
        assert kv.num_used_blocks == 0
        kv.reset()
        assert kv.find_prefix(sequences[0]) == 0
        kv.check_integrity(fill(kv))

    def test_integrity_notices_a_session_that_keeps_more_than_its_room(self) -> None:
        kv, session = self.make_kv(), make_session("s")
        run_and_keep(kv, session, 3)
        session.token_ids += [5] * NUM_TOKENS
        with pytest.raises(AssertionError, match="s keeps"):
            kv.check_integrity([])

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
