"""Streams that clients, deadlines or ranks stop, over loopback."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1 import generation_pb2_grpc

from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.running_time import running_time
from tests.servers.runtime import Runtime, details_of_status, raises, serve_runtime, token_request, tokens_of


async def test_abort_frees_the_slot_before_it_answers(served: Runtime) -> None:
    await served.deploy()
    served.ranks.step_s = 0.005
    call = served.generation.Generate(token_request([5], 60, request_id="victim"))
    events = [await anext(aiter(call)), await anext(aiter(call))]
    abort = pb.AbortRequest(deployment_id="d", request_id="victim")
    assert (await served.generation.Abort(abort)).outcome == pb.AbortResponse.OUTCOME_ABORTED
    assert (await served.get()).load.used_slots == 0
    async with raises("ABORTED", "REQUEST_ABORTED"):
        async for event in call:
            events.append(event)  # noqa: PERF401
    finished = [event.finished for event in events if event.HasField("finished")]
    assert len(finished) == 1
    assert finished[0].reason == pb.FINISH_REASON_ABORTED
    assert details_of_status(finished[0].status)[0].reason == "REQUEST_ABORTED"
    assert finished[0].usage.generated_tokens == len(tokens_of(events))
    assert (await served.generation.Abort(abort)).outcome == pb.AbortResponse.OUTCOME_ALREADY_FINISHED


async def test_client_that_never_reads_loses_its_slot(tmp_path: Path) -> None:
    """Others wait for the slot, and operations for the request, no longer than the stall timeout."""
    async with serve_runtime(tmp_path, "--stall-timeout=0.5") as served:
        await served.deploy(num_slots=1, token_buckets=(1024,))
        request = token_request([5], 1000)
        request.output.logits = True
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
        async with grpc.aio.insecure_channel(served.address, options=window) as channel:
            silent = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            await served.wait_for_slots(1)
            async with asyncio.timeout(HANG_S):
                assert tokens_of(await served.generate([7], 5)) == expected_tokens([7], 5)
            events = []
            async with raises("ABORTED", "CLIENT_STALLED"):
                async for event in silent:
                    events.append(event)  # noqa: PERF401
        received = tokens_of(events)
        assert 0 < len(received) < 1000
        assert received == expected_tokens([5], len(received))


async def test_cancelled_call_frees_its_slot_within_a_step(served: Runtime) -> None:
    await served.deploy()
    served.ranks.step_s = 0.005
    call = served.generation.Generate(token_request([5], 60))
    await anext(aiter(call))
    await anext(aiter(call))
    served.ranks.gate.clear()
    call.cancel()
    # The step that is under way cannot end, and none can begin but one that was called ahead.
    await served.wait_for_slots(0)
    num_steps = len(served.ranks.steps)
    assert num_steps < 60, "the sequence was over before its call was cancelled"
    served.ranks.gate.set()
    await asyncio.sleep(0.05)
    assert [step.depends_on_previous for step in served.ranks.steps[num_steps:]] in ([], [True])


async def test_lost_connection_frees_its_slot(served: Runtime) -> None:
    await served.deploy()
    served.ranks.gate.clear()
    channel = grpc.aio.insecure_channel(served.address)
    stub = type(served.generation)(channel)
    call = stub.Generate(token_request([5], 60))
    await anext(aiter(call))
    await served.wait_for_slots(1)
    await channel.close()
    await served.wait_for_slots(0)


async def test_deadline_ends_the_sequence_with_its_terminal_event(
    served: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the client within the margin, or not at all: this one is ten times as long as the server's."""
    monkeypatch.setattr("runtime_svc.generation_service.DEADLINE_MARGIN_S", 0.5)
    await served.deploy()
    served.ranks.step_s = 0.05
    events = []
    async with raises("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"):
        async for event in served.generation.Generate(token_request([5], 60), timeout=2):
            events.append(event)  # noqa: PERF401
    assert events[-1].finished.reason == pb.FINISH_REASON_TIME
    assert events[-1].finished.usage.generated_tokens == len(tokens_of(events)) > 0
    assert (await served.get()).load.used_slots == 0


async def test_deadline_ends_a_waiting_request(served: Runtime) -> None:
    await served.deploy(num_slots=1)
    served.ranks.gate.clear()
    running = served.generation.Generate(token_request([5], 3))
    await anext(aiter(running))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.generation.Generate(token_request([5]), timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    served.ranks.gate.set()
    assert tokens_of([event async for event in running]) == expected_tokens([5], 3)


async def test_killed_rank_ends_its_streams_and_the_next_request_works(served: Runtime) -> None:
    await served.deploy(num_slots=1)
    served.ranks.step_s = 0.005
    running = served.generation.Generate(token_request([5], 60))
    waiting = served.generation.Generate(token_request([6], 3))
    events = [await anext(aiter(running)), await anext(aiter(running))]
    with running_time() as taken:
        served.ranks.die()
        async with raises("UNAVAILABLE", "RANK_DIED"):
            async for event in running:
                events.append(event)  # noqa: PERF401
    assert taken.s < 2
    assert events[-1].finished.reason == pb.FINISH_REASON_ERROR
    assert details_of_status(events[-1].finished.status)[0].reason == "RANK_DIED"
    assert tokens_of([event async for event in waiting]) == expected_tokens([6], 3)
    assert tokens_of(await served.generate([7])) == expected_tokens([7], 5)


async def test_slow_client_pauses_its_own_sequence_only(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--stream-capacity=8") as served:
        await served.deploy(token_buckets=(20_000,))
        # Otherwise gRPC itself buffers megabytes for a client that does not read.
        channel = grpc.aio.insecure_channel(served.address, options=[("grpc.http2.bdp_probe", 0)])
        slow = type(served.generation)(channel).Generate(token_request([5], 8_000))
        first = await anext(aiter(slow))
        steps, deadline_s = -1, time.monotonic() + HANG_S
        while steps != (await served.get()).load.steps:
            assert time.monotonic() < deadline_s, "the sequence was never paused"
            steps = (await served.get()).load.steps
            await asyncio.sleep(0.2)
        assert steps < 7_000
        load = (await served.get()).load
        assert (load.used_slots, load.used_blocks) == (1, 1)
        assert 1 < load.used_tokens < load.block_tokens
        assert tokens_of(await served.generate([6], 40)) == expected_tokens([6], 40)
        events = [first] + [event async for event in slow]
        assert tokens_of(events) == expected_tokens([5], 8_000)
        await channel.close()
