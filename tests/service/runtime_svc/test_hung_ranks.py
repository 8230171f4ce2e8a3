"""A runtime whose ranks or forkservers are stopped: it notices, says so, and serves again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as pb

from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.hang_guard import HANG_S
from tests.processes import is_rank, note_others, own_children
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy, toy, toy_directory
from tests.ranks.toy_publishing import publish_toy
from tests.servers.runtime import Runtime, details_of, raises, serve_runtime, token_request, tokens_of

__all__ = ["toy", "toy_directory"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 2.0
PROMPTS = count(10)
State = pb.Deployment.State


@pytest.fixture(scope="module")
def bundle(toy: MakeToy) -> ToyBundle:
    """One that picks tokens itself, so that steps are called ahead."""
    return toy("tokens", 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory, bundle: ToyBundle) -> AsyncIterator[Runtime]:
    """A runtime that serves the toy as `d`; tests leave it as they found it."""
    note_others()
    with RankForkservers(patience_s=TIMEOUT_S) as forkservers:
        start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open, min_step_timeout_s=TIMEOUT_S)
        async with serve_runtime(tmp_path_factory.mktemp("runtime"), start_ranks=start_ranks) as served:
            for name, seed in (("story", 0), ("other", 1)):
                served.bundles.names[name] = publish_toy(served.store, bundle, seed)
            await served.load("story")
            yield served


def find_rank() -> psutil.Process:
    (rank,) = [child for child in own_children() if is_rank(child)]
    return rank


def forkserver_of(rank: psutil.Process) -> psutil.Process:
    parent = rank.parent()
    assert parent is not None
    assert parent.name() == "kiln-forkserver"
    return parent


async def generate(served: Runtime) -> list[int]:
    return tokens_of(await served.generate([3, 9, 4], 8, temperature=0.0))


async def hang(served: Runtime, rank: psutil.Process, token: int | None = None) -> grpc.aio.UnaryStreamCall[Any, Any]:
    """Stops the rank and returns a request whose step it does not end; a prompt that no other test has by default."""
    rank.suspend()
    prompt = [next(PROMPTS) if token is None else token]
    stream = served.generation.Generate(token_request(prompt, 12, temperature=0.0))
    await served.wait_for_slots(1)
    return stream


async def end_of(stream: grpc.aio.UnaryStreamCall[Any, Any], metadata: dict[str, str] | None = None) -> tuple[str, str]:
    """Code and reason of a stream, after its one terminal event. The details of the error go to `metadata`."""
    events: list[Any] = []
    end = ("OK", "")
    try:
        async for event in stream:
            events.append(event)  # noqa: PERF401 - they stay if the stream fails
    except grpc.aio.AioRpcError as error:
        info, _ = details_of(error)
        end = (error.code().name, info.reason)
        (metadata if metadata is not None else {}).update(info.metadata)
    assert [event.HasField("finished") for event in events].count(True) == 1
    return end


async def watch_health(served: Runtime) -> AsyncIterator[str]:
    request = health_pb2.HealthCheckRequest(service="deployment/d")
    async for response in health_pb2_grpc.HealthStub(served.channel).Watch(request):
        yield health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def wait_for_ready(served: Runtime, *gone: psutil.Process) -> None:
    async with asyncio.timeout(60):
        while any(one.is_running() for one in gone) or (await served.get()).state != State.STATE_READY:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_stopped_rank_ends_its_streams_and_is_replaced(real: Runtime) -> None:
    before, rank, health = await generate(real), find_rank(), watch_health(real)
    assert await anext(health) == "SERVING"
    engine = real.server.deployments.get("d").engine
    assert engine is not None
    hangs = engine.scheduler.statistics.rank_hangs
    begun_s = time.monotonic()
    async with asyncio.timeout(60):
        streams = [await hang(real, rank), *(real.generation.Generate(token_request([6], 4)) for _ in range(4))]
        assert await end_of(streams[0]) == ("UNAVAILABLE", "RANK_HUNG")
        assert time.monotonic() - begun_s >= TIMEOUT_S
        assert await anext(health) == "NOT_SERVING"
        assert await anext(health) == "SERVING"
        ends = await asyncio.gather(*(end_of(stream) for stream in streams[1:]))
    assert set(ends) <= {("OK", ""), ("UNAVAILABLE", "RANK_HUNG")}
    assert ("OK", "") in ends, "a request that waited goes on"
    assert not rank.is_running()
    assert await generate(real) == before
    assert engine.scheduler.statistics.rank_hangs == hangs + 1


async def test_a_reset_that_aborts_does_not_wait_for_a_hung_step(real: Runtime) -> None:
    before, rank = await generate(real), find_rank()
    stream = await hang(real, rank)
    request = pb.ResetKVCacheRequest(deployment_id="d", in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT)
    receipt = await real.control.ResetKVCache(request, timeout=30)
    assert receipt.zeroed_bytes == (await real.get()).kv_bytes
    metadata: dict[str, str] = {}
    assert await end_of(stream, metadata) == ("UNAVAILABLE", "RANK_HUNG")
    assert float(metadata["waited_s"]) < TIMEOUT_S
    assert not rank.is_running()
    assert await generate(real) == before


async def test_weights_that_are_loaded_with_abort_do_not_wait_for_a_hung_step(real: Runtime) -> None:
    before, rank = await generate(real), find_rank()
    stream = await hang(real, rank)
    async with asyncio.timeout(60), raises("UNAVAILABLE", "RANK_HUNG") as caught:
        await real.load_weights("other", in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT)
    assert float(details_of(caught[0])[0].metadata["waited_s"]) < TIMEOUT_S
    assert await end_of(stream) == ("UNAVAILABLE", "RANK_HUNG")
    await wait_for_ready(real, rank)
    assert await generate(real) == before


async def test_an_unload_that_aborts_does_not_wait_for_a_hung_step(real: Runtime) -> None:
    rank = find_rank()
    stream = await hang(real, rank)
    async with asyncio.timeout(HANG_S):
        assert (await real.unload()).aborted_requests == 1
        assert await end_of(stream) == ("ABORTED", "REQUEST_ABORTED")
    assert not rank.is_running()
    await real.load("story")


@pytest.mark.parametrize("act", [psutil.Process.kill, psutil.Process.suspend])
async def test_a_rank_is_lost_while_its_forkserver_is_stopped(
    real: Runtime, act: Callable[[psutil.Process], None]
) -> None:
    before, rank = await generate(real), find_rank()
    forkserver = forkserver_of(rank)
    forkserver.suspend()
    stream = await hang(real, rank)
    act(rank)
    async with asyncio.timeout(60):
        code, reason = await end_of(stream)
    assert (code, reason in {"RANK_DIED", "RANK_HUNG"}) == ("UNAVAILABLE", True)
    await wait_for_ready(real, rank, forkserver)
    assert await generate(real) == before


async def test_a_prompt_over_which_a_rank_is_killed_twice_is_refused_until_the_deployment_is_loaded_anew(
    real: Runtime,
) -> None:
    before, guilty = await generate(real), next(PROMPTS)
    request = token_request([guilty], 12, temperature=0.0)
    for _ in range(2):
        rank = find_rank()
        stream = await hang(real, rank, guilty)
        rank.kill()
        assert await end_of(stream) == ("UNAVAILABLE", "RANK_DIED")
        await wait_for_ready(real, rank)
    async with raises("FAILED_PRECONDITION", "PROMPT_QUARANTINED") as caught:
        await anext(aiter(real.generation.Generate(request)))
    assert "unloading and loading the deployment" in str(caught[0].details())
    assert await generate(real) == before, "other prompts are served"
    await real.unload()
    await real.load("story")
    assert len(tokens_of([event async for event in real.generation.Generate(request)])) == 12
