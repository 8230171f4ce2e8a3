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
from kiln.runtime.v1 import runtime_pb2 as pb

from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.hang_guard import HANG_S, until
from tests.processes import is_rank, note_others, own_children
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy, toy, toy_directory
from tests.ranks.toy_publishing import publish_toy
from tests.servers.refusals import Refusal, refusal, refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of

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


async def lost(stream: grpc.aio.UnaryStreamCall[Any, Any], *reasons: str) -> Refusal:
    """Expects a stream to fail for one of the reasons, after its one terminal event."""
    async with asyncio.timeout(HANG_S):
        how = await refusal(stream)
    assert how.reason in reasons
    assert (how.code is grpc.StatusCode.UNAVAILABLE) is how.reason.startswith("RANK")
    assert [event.HasField("finished") for event in how.events].count(True) == 1
    return how


async def wait_for_ready(served: Runtime, *gone: psutil.Process) -> None:
    await until(lambda: not any(one.is_running() for one in gone))
    await served.wait_for_state("READY")


async def test_a_stopped_rank_ends_its_streams_and_is_replaced(real: Runtime) -> None:
    before, rank, health = await generate(real), find_rank(), real.watch_health("deployment/d")
    assert await anext(health) == "SERVING"
    statistics = real.engine().scheduler.statistics
    hangs, begun_s = statistics.rank_hangs, time.monotonic()
    stream = await hang(real, rank)
    others = [asyncio.create_task(real.generate([6], 4)) for _ in range(4)]
    await lost(stream, "RANK_HUNG")
    assert time.monotonic() - begun_s >= TIMEOUT_S
    assert await anext(health) == "NOT_SERVING"
    assert await anext(health) == "SERVING"
    ends = await asyncio.gather(*others, return_exceptions=True)
    assert any(isinstance(end, list) for end in ends), "a request that waited goes on"
    assert not rank.is_running()
    assert await generate(real) == before
    assert statistics.rank_hangs == hangs + 1


async def test_a_reset_that_aborts_does_not_wait_for_a_hung_step(real: Runtime) -> None:
    before, rank = await generate(real), find_rank()
    stream = await hang(real, rank)
    request = pb.ResetKVCacheRequest(deployment_id="d", in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT)
    receipt = await real.control.ResetKVCache(request, timeout=30)
    assert receipt.zeroed_bytes == (await real.get()).kv_bytes
    assert float((await lost(stream, "RANK_HUNG")).metadata["waited_s"]) < TIMEOUT_S
    assert not rank.is_running()
    assert await generate(real) == before


async def test_an_unload_that_aborts_does_not_wait_for_a_hung_step(real: Runtime) -> None:
    rank = find_rank()
    stream = await hang(real, rank)
    async with asyncio.timeout(HANG_S):
        assert (await real.unload()).aborted_requests == 1
    await lost(stream, "REQUEST_ABORTED")
    assert not rank.is_running()
    await real.load("story")


@pytest.mark.parametrize("act", [psutil.Process.kill, pytest.param(psutil.Process.suspend, marks=pytest.mark.slow)])
async def test_a_rank_is_lost_while_its_forkserver_is_stopped(
    real: Runtime, act: Callable[[psutil.Process], None]
) -> None:
    before, rank = await generate(real), find_rank()
    forkserver = forkserver_of(rank)
    forkserver.suspend()
    stream = await hang(real, rank)
    act(rank)
    # The forkserver reports no death meanwhile, so either may be noticed first.
    await lost(stream, "RANK_DIED", "RANK_HUNG")
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
        await lost(stream, "RANK_DIED")
        await wait_for_ready(real, rank)
    how = await refused(real.generation.Generate(request), "FAILED_PRECONDITION", "PROMPT_QUARANTINED")
    assert "unloading and loading the deployment" in how.message
    assert await generate(real) == before, "other prompts are served"
    await real.unload()
    await real.load("story")
    assert len(tokens_of([event async for event in real.generation.Generate(request)])) == 12
