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
from kiln.runtime.v1 import generation_pb2_grpc

from tests.hang_guard import HANG_S, until
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import read_refusal, refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of

STALL_TIMEOUT_S = 0.3
#: Enough for events to wait at the server whatever gRPC buffers.
NUM_TOKENS, NUM_LOGPROBS, NUM_COALESCED = 1500, 20, 4000
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
    scheduler = served.engine().scheduler
    await until(lambda: scheduler.num_running and all(one.is_paused for one in scheduler.running))


@pytest.mark.parametrize(("action", "num_sequences"), [(None, 4), (Policy.ACTION_PAUSE, 1)])
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


async def test_paused_sequence_that_others_wait_for_ends_with_its_terminal_event(tmp_path: Path) -> None:
    async with serve(tmp_path, num_slots=1) as served, silent_channel(served) as channel:
        call = generate(channel, Policy(action=Policy.ACTION_PAUSE))
        await served.wait_for_slots(1)
        await wait_until_paused(served)
        assert tokens_of(await served.generate([7], 5)) == expected_tokens([7], 5)
        events = (await refused(call, "ABORTED", "CLIENT_STALLED")).events
        finished = events[-1].finished
        assert finished.reason == pb.FINISH_REASON_ABORTED
        assert read_refusal(finished.status).reason == "CLIENT_STALLED"
        assert finished.usage.generated_tokens == len(tokens_of(events))
        assert tokens_of(events) == expected_tokens([5], len(tokens_of(events)))


@pytest.mark.slow
async def test_coalesced_sequence_frees_its_slot_and_waits_for_its_client(tmp_path: Path) -> None:
    async with serve(tmp_path, num_slots=1) as served, silent_channel(served) as channel:
        call = generate(channel, Policy(action=Policy.ACTION_COALESCE), NUM_COALESCED)
        await served.wait_for_slots(1)
        await served.wait_for(lambda one: not one.load.used_slots)
        await asyncio.sleep(2 * STALL_TIMEOUT_S)
        events = [event async for event in call]
        assert tokens_of(events) == expected_tokens([5], NUM_COALESCED)
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
        await served.wait_for(lambda one: not one.load.used_slots)
        await refused(call, "ABORTED", "CLIENT_STALLED")
