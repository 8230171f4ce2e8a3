"""Ranks that do not answer: stopped by a signal, or in a step that never returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial

import pytest

from execution.errors import RankHung
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.ranks.watchdog import BUSY_FACTOR, HURRY_DIVISOR
from targets.cpu import EXPORTED_PROGRAM
from tests.hang_guard import HANG_S
from tests.ranks.hanging import Hang, hanging_forkserver
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy
from tests.ranks.toy_groups import PREFILL, loaded_group
from tests.running_time import running_time

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 0.6
impatient_group = partial(loaded_group, min_step_timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def eager(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0)


@pytest.fixture(scope="module")
def pair(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0, 2)


async def time_hang(call: Awaitable[object]) -> tuple[RankHung, float, float]:
    """The error of a call that hangs, the seconds until it came, and those of them in which this process ran."""
    begun_s = time.perf_counter()
    with running_time() as taken, pytest.raises(RankHung) as caught:
        async with asyncio.timeout(HANG_S):
            await call
    return caught.value, time.perf_counter() - begun_s, taken.s


async def test_a_stopped_rank_ends_its_group(eager: ToyBundle, forkservers: RankForkservers) -> None:
    async with impatient_group(eager.manifest, eager.blobs, forkservers) as (group, (process,)):
        await group.run(PREFILL)
        process.suspend()
        hung, waited_s, ran_s = await time_hang(group.run(PREFILL))
        assert (hung.rank, hung.reason, hung.metadata["call"]) == (0, "RANK_HUNG", "RunStep")
        assert "the rank is stopped" in str(hung)
        assert waited_s >= TIMEOUT_S
        assert ran_s < 10 * TIMEOUT_S
        assert await group.died is hung
        for late in (group.run(PREFILL), group.zero_state(None), group.stage_weights({0: eager.weights[1]})):
            with pytest.raises(RankHung):
                await late


@pytest.mark.parametrize(("call", "run"), [("WarmUp", RankGroup.warm_up), ("SwapWeights", RankGroup.swap_weights)])
async def test_a_rank_that_is_stopped_in_another_call(
    eager: ToyBundle, forkservers: RankForkservers, call: str, run: Callable[[RankGroup], Awaitable[object]]
) -> None:
    async with impatient_group(eager.manifest, eager.blobs, forkservers) as (group, (process,)):
        process.suspend()
        hung, *_ = await time_hang(run(group))
        assert hung.metadata["call"] == call


async def test_the_stopped_one_of_two_ranks_is_named(pair: ToyBundle, forkservers: RankForkservers) -> None:
    async with impatient_group(pair.manifest, pair.blobs, forkservers) as (group, processes):
        await group.run(PREFILL)
        processes[1].suspend()
        hung, *_ = await time_hang(group.run(PREFILL))
        assert hung.rank == 1
        assert "is stopped" in str(hung)


async def test_a_rank_that_goes_on_is_left_alone(eager: ToyBundle, forkservers: RankForkservers) -> None:
    async with loaded_group(eager.manifest, eager.blobs, forkservers, min_step_timeout_s=2.0) as (group, (process,)):
        for _ in range(2):
            process.suspend()
            step = asyncio.create_task(group.run(PREFILL))
            await asyncio.sleep(0.8)
            assert not step.done()
            process.resume()
            await step
        # Neither does a rank hang that owes no answer.
        process.suspend()
        await asyncio.sleep(2.6)
        assert process.is_running()
        process.resume()
        await group.run(PREFILL)
        assert not group.died.done()


@pytest.mark.parametrize(
    ("hang", "factor"), [("sleeping", 1), pytest.param("computing", BUSY_FACTOR, marks=pytest.mark.slow)]
)
async def test_a_step_that_never_returns(eager: ToyBundle, hang: Hang, factor: int) -> None:
    """A rank that computes gets ten times as long, and a tenth of all that if an operation is in a hurry."""
    with hanging_forkserver(EXPORTED_PROGRAM.name, hang) as forkserver:
        # In a hurry one look decides, so it must be longer than a busy host lets a rank wait for a processor.
        for divisor, timeout_s in ((1, TIMEOUT_S), (HURRY_DIVISOR, 5 * TIMEOUT_S)):
            group = await RankGroup.start(
                eager.manifest,
                eager.blobs,
                num_threads=1,
                log_sink=lambda _rank, _line: None,
                open_forkserver=lambda *_: forkserver,
                min_step_timeout_s=timeout_s,
            )
            try:
                await group.load()
                await group.warm_up()
                with nullcontext() if divisor == 1 else group.hurry():
                    hung, waited_s, ran_s = await time_hang(group.run(PREFILL))
            finally:
                await group.close()
            limit_s = timeout_s * factor / divisor
            assert waited_s >= limit_s
            assert ran_s < limit_s + 5 * TIMEOUT_S
            assert ("computes without end" in str(hung)) == (hang == "computing")
