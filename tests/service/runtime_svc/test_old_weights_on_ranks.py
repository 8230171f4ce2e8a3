"""Requests that end with old weights, and weights that come back, on real ranks: tokens are the model's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.store.reader import open_bundle
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.processes import is_rank, note_others, own_children
from tests.ranks.toy import ToyBundle, greedy
from tests.ranks.toy_bundles import MakeToy, toy, toy_directory
from tests.ranks.toy_publishing import publish_toy
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of

__all__ = ["toy", "toy_directory"]

FINISH = pb.IN_FLIGHT_POLICY_FINISH_ON_OLD
COUNT = 12


@dataclass(frozen=True)
class Stepwise:
    """A runtime whose ranks begin a step for each permit."""

    served: Runtime
    permits: asyncio.Semaphore

    async def begin(self, prompt: list[int]) -> Any:
        """A request that has come, and runs if there was none."""
        call = self.served.generation.Generate(token_request(prompt, COUNT, temperature=0.0))
        await anext(aiter(call))
        await self.served.wait_for(lambda one: one.load.used_slots)
        return call

    async def load_under(self, ref: str) -> pb.LoadWeightsResult:
        """Loads weights in the gap behind the next step."""
        load = asyncio.create_task(self.served.load_weights(ref, in_flight_policy=FINISH))
        await self.served.wait_for_operation()
        self.permits.release()
        result: pb.LoadWeightsResult = (await load)[-1].result
        return result

    def run_on(self) -> None:
        for _ in range(1000):
            self.permits.release()


@pytest.fixture(params=[("tokens", 1), ("logits", 2)], ids=str)
def bundle(request: pytest.FixtureRequest, toy: MakeToy) -> ToyBundle:
    """One that picks tokens itself, whose steps are called ahead, and one of two ranks."""
    picks, tp_degree = request.param
    return toy(picks, 0, tp_degree)


@pytest.fixture
async def stepwise(
    tmp_path: Path, bundle: ToyBundle, forkservers: RankForkservers, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stepwise]:
    """The toy, with other weights published as `other`."""
    note_others()
    permits, begin_now = asyncio.Semaphore(0), RankGroup.begin

    async def begin(self: RankGroup, step: Any) -> Any:
        await permits.acquire()
        return await begin_now(self, step)

    monkeypatch.setattr(RankGroup, "begin", begin)
    start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open)
    async with serve_runtime(tmp_path, start_ranks=start_ranks) as served:
        for name, seed in (("story", 0), ("other", 1)):
            served.bundles.names[name] = publish_toy(served.store, bundle, seed)
        await served.load("story")
        yield Stepwise(served, permits)


async def collect(call: Any) -> list[int]:
    return tokens_of([event async for event in call])


async def test_three_epochs_run_beside_each_other(stepwise: Stepwise) -> None:
    """The weights of the first one come back while its request still runs, and so does one of the second."""
    prompts = [[7], [3, 9, 4], [5, 6]]
    expected = [greedy(prompt, COUNT, seed=seed)[0] for prompt, seed in zip(prompts, (0, 1, 0), strict=True)]
    assert expected[1] != greedy(prompts[1], COUNT)[0]
    served, calls = stepwise.served, [await stepwise.begin(prompts[0])]
    assert (await stepwise.load_under("other")).deployment.old_weights.active_requests == 1
    calls.append(await stepwise.begin(prompts[1]))
    stepwise.permits.release()
    await served.wait_for_slots(2)
    assert (await stepwise.load_under("story")).weight_epoch == 3
    calls.append(await stepwise.begin(prompts[2]))
    stepwise.run_on()
    assert await asyncio.gather(*map(collect, calls)) == expected
    await served.wait_for(lambda one: not one.HasField("old_weights"))


async def test_kept_weights_come_back_without_their_files(stepwise: Stepwise) -> None:
    served = stepwise.served
    stepwise.run_on()
    await served.load_weights("other", keep_old_weights=True)
    for ref in ("story", "other"):
        bundle = open_bundle(served.store, served.bundles.names[ref])
        for shard in bundle.manifest.shards():
            bundle.blob_path(str(shard.blob)).unlink(missing_ok=True)
    for ref, seed in (("story", 0), ("other", 1), ("story", 0)):
        # A digest needs no store to say what it means.
        await served.load_weights(served.bundles.names[ref], keep_old_weights=True)
        call = served.generation.Generate(token_request([3, 9, 4], COUNT, temperature=0.0))
        assert await collect(call) == greedy([3, 9, 4], COUNT, seed=seed)[0]


async def test_a_killed_rank_ends_old_requests_and_the_new_weights_serve_on(stepwise: Stepwise) -> None:
    served, old = stepwise.served, await stepwise.begin([7])
    await stepwise.load_under("other")
    waiting = asyncio.create_task(collect(await stepwise.begin([3, 9, 4])))
    next(one for one in own_children() if is_rank(one)).kill()
    stepwise.run_on()
    await refused(old, "UNAVAILABLE", "RANK_DIED")
    assert await waiting == greedy([3, 9, 4], COUNT, seed=1)[0]
    assert not (await served.get()).HasField("old_weights")
