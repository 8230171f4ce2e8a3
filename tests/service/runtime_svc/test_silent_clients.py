"""Clients that do not read, over loopback: what they choose, and what others get meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1 import generation_pb2_grpc, runtime_pb2

from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, details_of_status, fields_of, raises, serve_runtime, token_request, tokens_of

STALL_TIMEOUT_S = 0.3
#: Enough for events to wait at the server whatever gRPC buffers.
NUM_TOKENS, NUM_LOGPROBS = 4000, 20
Policy = pb.StallPolicy


@asynccontextmanager
async def serve(tmp_path: Path, *, num_slots: int) -> AsyncIterator[Runtime]:
    async with serve_runtime(
        tmp_path, f"--stall-timeout={STALL_TIMEOUT_S}", "--max-stall-timeout=60", "--stream-capacity=8"
    ) as served:
        await served.deploy(num_slots=num_slots, token_buckets=(20_000,))
        yield served


@asynccontextmanager
async def silent_channel(served: Runtime) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with a small window that does not grow, as that of a client that means harm."""
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(served.address, options=window) as channel:
        yield channel


def generate(
    channel: grpc.aio.Channel, policy: pb.StallPolicy | None, num_tokens: int = NUM_TOKENS, num_sequences: int = 1
) -> Any:
    request = token_request([5], num_tokens)
    request.num_sequences = num_sequences
    # Otherwise all tokens fit into the buffers of gRPC if a busy machine puts many of them into each event.
    if policy is None or policy.action != Policy.ACTION_COALESCE:
        request.output.logprobs = NUM_LOGPROBS
    if policy is not None:
        request.stall_policy.CopyFrom(policy)
    return generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)


async def wait_until_paused(served: Runtime) -> None:
    engine = served.server.deployments.get("d").engine
    assert engine is not None
    async with asyncio.timeout(HANG_S):
        while not (running := engine.scheduler.running) or not all(one.is_paused for one in running):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("action", "num_sequences"), [(None, 1), (None, 4), (Policy.ACTION_PAUSE, 1)])
async def test_clients_that_never_read_hold_every_slot_no_longer_than_the_stall_timeout(
    tmp_path: Path, action: Any, num_sequences: int
) -> None:
    """Whatever they choose: a client that reads is served, and the slots are free again."""
    async with serve(tmp_path, num_slots=4) as served, silent_channel(served) as channel:
        policy = None if action is None else Policy(action=action)
        silent = [generate(channel, policy, num_sequences=num_sequences) for _ in range(4 // num_sequences)]
        await served.wait_for_slots(4)
        async with asyncio.timeout(HANG_S):
            assert tokens_of(await served.generate([7], 5)) == expected_tokens([7], 5)
        for call in silent:
            call.cancel()


async def test_paused_sequence_goes_on_when_its_client_is_back(tmp_path: Path) -> None:
    async with serve(tmp_path, num_slots=2) as served, silent_channel(served) as channel:
        call = generate(channel, Policy(action=Policy.ACTION_PAUSE))
        await served.wait_for_slots(1)
        await wait_until_paused(served)
        await asyncio.sleep(2 * STALL_TIMEOUT_S)
        assert tokens_of(await served.generate([7], 5)) == expected_tokens([7], 5), "there is another slot"
        assert tokens_of([event async for event in call]) == expected_tokens([5], NUM_TOKENS)


async def test_paused_sequence_that_others_wait_for_ends_with_its_terminal_event(tmp_path: Path) -> None:
    async with serve(tmp_path, num_slots=1) as served, silent_channel(served) as channel:
        call = generate(channel, Policy(action=Policy.ACTION_PAUSE))
        await served.wait_for_slots(1)
        await wait_until_paused(served)
        assert tokens_of(await served.generate([7], 5)) == expected_tokens([7], 5)
        events = []
        async with raises("ABORTED", "CLIENT_STALLED"):
            async for event in call:
                events.append(event)  # noqa: PERF401
        finished = events[-1].finished
        assert finished.reason == pb.FINISH_REASON_ABORTED
        assert details_of_status(finished.status)[0].reason == "CLIENT_STALLED"
        assert finished.usage.generated_tokens == len(tokens_of(events))
        assert tokens_of(events) == expected_tokens([5], len(tokens_of(events)))


async def test_coalesced_sequence_frees_its_slot_and_waits_for_its_client(tmp_path: Path) -> None:
    async with serve(tmp_path, num_slots=1) as served, silent_channel(served) as channel:
        call = generate(channel, Policy(action=Policy.ACTION_COALESCE), NUM_TOKENS)
        await served.wait_for_slots(1)
        async with asyncio.timeout(HANG_S):
            while (await served.get()).load.used_slots:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(2 * STALL_TIMEOUT_S)
        events = [event async for event in call]
        assert tokens_of(events) == expected_tokens([5], NUM_TOKENS)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        # On a busy machine some 30 tokens share each event from the beginning, and all of them fit into gRPC's buffers.
        assert max(len(event.delta.tokens) for event in events) > 20, "what waited came at once"
        assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_chosen_timeout_ends_the_call(tmp_path: Path) -> None:
    async with serve(tmp_path, num_slots=1) as served, silent_channel(served) as channel:
        policy = Policy(action=Policy.ACTION_PAUSE)
        policy.timeout.FromMilliseconds(500)
        call = generate(channel, policy)
        await served.wait_for_slots(1)
        async with asyncio.timeout(HANG_S):
            while (await served.get()).load.used_slots:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with raises("ABORTED", "CLIENT_STALLED"):
            async for _ in call:
                pass


async def test_policy_beyond_the_servers_bounds_is_refused_by_name(served: Runtime) -> None:
    await served.deploy()
    request = token_request([5])
    request.stall_policy.timeout.FromSeconds(31)
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.generation.Generate(request).read()
    assert fields_of(caught[0]) == ["stall_policy.timeout"]
    request.stall_policy.action = 9  # type: ignore[assignment] # of a later schema
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.generation.Generate(request).read()
    assert fields_of(caught[0]) == ["stall_policy.action"]


async def test_weights_do_not_wait_for_a_client_that_stays_away(tmp_path: Path) -> None:
    async with serve(tmp_path, num_slots=2) as served, silent_channel(served) as channel:
        call = generate(channel, Policy(action=Policy.ACTION_PAUSE))
        await served.wait_for_slots(1)
        await wait_until_paused(served)
        async with asyncio.timeout(HANG_S):
            await served.load_weights("story", in_flight_policy=runtime_pb2.IN_FLIGHT_POLICY_WAIT)
        call.cancel()
