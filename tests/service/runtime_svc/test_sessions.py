"""Sessions as clients see them: what continues, what is refused, and who sees which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.abi.inputs import COMPUTED_CONTEXT
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.hang_guard import until
from tests.ranks.fakes import STATE_BYTES, expected_tokens
from tests.servers.metrics import scrape
from tests.servers.refusals import refusal, refused
from tests.servers.runtime import Metadata, Runtime, hold, serve_runtime, token_request, tokens_of
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks

FLAGS = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)
KEY = SigningKey()
PROMPT = [5, 6, 7, 8, 9]


def turn(prompt: list[int], session_id: str = "s", **options: Any) -> generation.GenerateRequest:
    request = token_request(prompt)
    request.MergeFrom(generation.GenerateRequest(session_id=session_id, **options))
    return request


async def ask(served: Runtime, request: generation.GenerateRequest, metadata: Metadata = ()) -> int:
    """Generates and checks the tokens; returns how many of the prompt the cache had."""
    events = await served.ask(request, metadata)
    assert tokens_of(events) == expected_tokens(list(request.token_ids.ids), 5)
    return int(events[-1].finished.usage.cached_prompt_tokens)


async def list_sessions(served: Runtime, metadata: Metadata = ()) -> list[pb.Session]:
    request = pb.ListSessionsRequest(deployment_id="d")
    return [*(await served.control.ListSessions(request, metadata=metadata)).sessions]


def reset_of(session_id: str, **options: Any) -> pb.ResetKVCacheRequest:
    return pb.ResetKVCacheRequest(deployment_id="d", session=pb.SessionScope(session_id=session_id), **options)


async def test_a_session_is_continued_listed_and_reset(served: Runtime) -> None:
    assert (await served.deploy(flags=FLAGS)).capabilities.sessions
    assert await ask(served, turn(PROMPT)) == 0
    assert await ask(served, turn([*PROMPT, *expected_tokens(PROMPT, 5), 11])) == 9
    assert await ask(served, turn([*PROMPT, 12], "t")) == 0
    first, second = await list_sessions(served)
    assert (first.id, first.held_tokens, first.running, second.id) == ("s", 15, False, "t")
    assert first.last_use_time.ToNanoseconds() < second.last_use_time.ToNanoseconds()
    kept_ns = first.expire_time.ToNanoseconds() - first.last_use_time.ToNanoseconds()
    assert kept_ns == pytest.approx(600e9, abs=1000)
    receipt = await served.control.ResetKVCache(reset_of("s"))
    assert (receipt.affected_sequences, receipt.freed_slots, receipt.freed_blocks) == (0, 0, 1)
    assert receipt.zeroed_bytes == STATE_BYTES
    assert [one.id for one in await list_sessions(served)] == ["t"]
    await refused(served.control.ResetKVCache(reset_of("s")), "NOT_FOUND", "SESSION_NOT_FOUND")
    assert await ask(served, turn(PROMPT)) == 0


async def test_a_session_in_use_refuses_a_second_request_and_a_reset(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    call = await hold(served, turn(PROMPT))
    caught = await refused(served.generation.Generate(turn(PROMPT)), "ABORTED", "SESSION_BUSY")
    assert caught.metadata["session_id"] == "s"
    await refused(served.control.ResetKVCache(reset_of("s")), "ABORTED", "SESSION_BUSY")
    (session,) = await list_sessions(served)
    assert session.running
    assert not session.HasField("expire_time")
    served.ranks.gate.set()
    assert tokens_of([event async for event in call]) == expected_tokens(PROMPT, 5)
    assert await ask(served, turn(PROMPT)) == 4


async def test_options_of_the_server_bound_sessions(tmp_path: Path) -> None:
    options = ("--max-sessions=2", "--session-ttl=0.2", "--max-session-ttl=30")
    async with serve_runtime(tmp_path, *options) as served:
        await served.deploy(flags=FLAGS)
        for name in ("oldest", "a", "b"):
            request = turn(PROMPT, name)
            request.session_ttl.FromSeconds(30)
            await ask(served, request)
        assert [one.id for one in await list_sessions(served)] == ["a", "b"], "the oldest of three went"
        await ask(served, turn(PROMPT, "short"))

        async def is_alone() -> bool:
            return [one.id for one in await list_sessions(served)] == ["b"]

        await until(is_alone)


async def test_callers_do_not_touch_each_others_sessions(tmp_path: Path, logs: list[dict[str, Any]]) -> None:
    jwks = write_jwks(tmp_path / "jwks.json", [KEY])
    async with serve_runtime(tmp_path, f"--auth-jwks={jwks}") as served:
        await served.deploy(flags=FLAGS)
        alice, bob, operator = (
            bearer(KEY.sign(make_claims(scope, sub=name)))
            for name, scope in (("alice", "infer"), ("bob", "infer"), ("operator", "load"))
        )
        assert await ask(served, turn(PROMPT), alice) == 0
        assert await ask(served, turn(PROMPT), bob) == 0
        assert await ask(served, turn(PROMPT), alice) == 4
        assert [one.held_tokens for one in await list_sessions(served, alice)] == [9]
        logs.clear()
        await served.control.ResetKVCache(reset_of("s"), metadata=bob)
        assert not [log for log in logs if log["event"] == "allowed"], "the audit log has no resets of own sessions"
        assert await list_sessions(served, bob) == []
        assert [one.held_tokens for one in await list_sessions(served, alice)] == [9]
        await refused(served.control.ResetKVCache(reset_of("s"), metadata=bob), "NOT_FOUND", "SESSION_NOT_FOUND")
        for call in (
            served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"), metadata=alice),
            served.control.ResetKVCache(reset_of("s"), metadata=operator),
            served.control.ListSessions(pb.ListSessionsRequest(deployment_id="d"), metadata=operator),
        ):
            assert (await refusal(call)).reason == "SCOPE_MISSING"
        logs.clear()
        await served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"), metadata=operator)
        assert [log["event"] for log in logs].count("allowed") == 1


async def test_metrics_count_sessions_what_they_save_and_what_they_lose(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--metrics-address=127.0.0.1:0") as served:
        await served.deploy(flags=FLAGS, num_slots=2)
        await ask(served, turn(PROMPT, "a"))
        await ask(served, turn([*PROMPT, *expected_tokens(PROMPT, 5), 11], "a"))
        for session_id in "bc":
            await ask(served, turn(PROMPT, session_id))
        samples = await scrape(served.server.edge.metrics_port)
        names = ("kiln:sessions", "kiln:session_tokens_total", "kiln:session_evictions_total")
        assert [samples[f"{name}{{model_name=d}}"] for name in names] == [3, 9, 1]
