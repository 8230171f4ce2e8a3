"""Sessions as clients see them: what continues, what is refused, and who sees which."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb
from structlog.testing import capture_logs

from bundle.abi.inputs import COMPUTED_CONTEXT, LEFT_PADDED
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.fakes import STATE_BYTES, expected_tokens
from tests.servers.metrics import scrape
from tests.servers.runtime import Runtime, details_of, fields_of, hold, raises, serve_runtime, token_request, tokens_of
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks

FLAGS = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)
KEY = SigningKey()
PROMPT = [5, 6, 7, 8, 9]
Metadata = tuple[tuple[str, str], ...]


def turn(prompt: list[int], session_id: str = "s", **options: Any) -> generation.GenerateRequest:
    request = token_request(prompt)
    request.MergeFrom(generation.GenerateRequest(session_id=session_id, **options))
    return request


async def ask(served: Runtime, request: generation.GenerateRequest, metadata: Metadata = ()) -> int:
    """Generates and checks the tokens; returns how many of the prompt the cache had."""
    events = [event async for event in served.generation.Generate(request, metadata=metadata)]
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
    async with raises("NOT_FOUND", "SESSION_NOT_FOUND"):
        await served.control.ResetKVCache(reset_of("s"))
    assert await ask(served, turn(PROMPT)) == 0


async def test_a_session_in_use_refuses_a_second_request_and_a_reset(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    call = await hold(served, turn(PROMPT))
    async with raises("ABORTED", "SESSION_BUSY") as caught:
        await served.generation.Generate(turn(PROMPT)).read()
    assert details_of(caught[0])[0].metadata["session_id"] == "s"
    async with raises("ABORTED", "SESSION_BUSY"):
        await served.control.ResetKVCache(reset_of("s"))
    (session,) = await list_sessions(served)
    assert session.running
    assert not session.HasField("expire_time")
    served.ranks.gate.set()
    assert tokens_of([event async for event in call]) == expected_tokens(PROMPT, 5)
    assert await ask(served, turn(PROMPT)) == 4


async def test_a_session_may_be_used_again_once_its_call_has_ended(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    call = await hold(served, turn(PROMPT))
    call.cancel()
    served.ranks.gate.set()
    await served.wait_for_slots(0)
    assert await ask(served, turn(PROMPT)) in {0, 4}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"session_id": "with space"}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"session_id": ""}, "session_ttl"),
        ({"ttl_s": 0.5}, "session_ttl"),
        ({"ttl_s": 3601}, "session_ttl"),
    ],
)
async def test_malformed_sessions(served: Runtime, options: dict[str, Any], field: str) -> None:
    await served.deploy(flags=FLAGS)
    request = turn(PROMPT, options.get("session_id", "s"))
    request.session_ttl.FromNanoseconds(round(options.get("ttl_s", 5) * 1e9))
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.generation.Generate(request).read()
    assert fields_of(caught[0]) == [field]


@pytest.mark.parametrize("flags", [DYNAMIC_FLAGS, (*DYNAMIC_FLAGS, LEFT_PADDED)])
async def test_executables_that_begin_prompts_at_position_0_have_no_sessions(
    served: Runtime, flags: tuple[str, ...]
) -> None:
    assert not (await served.deploy(flags=flags)).capabilities.sessions
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await served.generation.Generate(turn(PROMPT)).read()
    (violation,) = details_of(caught[0])[1].field_violations
    assert violation.field == "session_id"
    assert "cannot begin a prompt behind what the KV cache holds" in violation.description
    assert ("padding_side: left" in violation.description) is (LEFT_PADDED in flags)
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await served.control.ResetKVCache(reset_of("s"))
    assert fields_of(caught[0]) == ["scope"]


async def test_resets_of_sessions_that_are_malformed(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    policy = pb.IN_FLIGHT_POLICY_ABORT
    for request, field in (
        (reset_of(""), "session.session_id"),
        (reset_of("s", in_flight_policy=policy), "in_flight_policy"),
    ):
        async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
            await served.control.ResetKVCache(request)
        assert fields_of(caught[0]) == [field]


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
        async with asyncio.timeout(20):
            while [one.id for one in await list_sessions(served)] != ["b"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_callers_do_not_touch_each_others_sessions(tmp_path: Path) -> None:
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
        await served.control.ResetKVCache(reset_of("s"), metadata=bob)
        assert await list_sessions(served, bob) == []
        assert [one.held_tokens for one in await list_sessions(served, alice)] == [9]
        async with raises("NOT_FOUND", "SESSION_NOT_FOUND"):
            await served.control.ResetKVCache(reset_of("s"), metadata=bob)
        for metadata, call in (
            (alice, served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"), metadata=alice)),
            (operator, served.control.ResetKVCache(reset_of("s"), metadata=operator)),
            (operator, served.control.ListSessions(pb.ListSessionsRequest(deployment_id="d"), metadata=operator)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert details_of(caught.value)[0].reason == "SCOPE_MISSING", metadata


async def test_the_audit_log_has_resets_of_the_deployment_and_none_of_own_sessions(tmp_path: Path) -> None:
    jwks = write_jwks(tmp_path / "jwks.json", [KEY])
    async with serve_runtime(tmp_path, f"--auth-jwks={jwks}") as served:
        await served.deploy(flags=FLAGS)
        alice = bearer(KEY.sign(make_claims("infer load")))
        await ask(served, turn(PROMPT), alice)
        with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
            await served.control.ResetKVCache(reset_of("s"), metadata=alice)
            assert not [log for log in logs if log["event"] == "allowed"]
            await served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"), metadata=alice)
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
