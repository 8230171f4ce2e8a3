"""Steps that are called while the one before them runs, on real rank processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from execution.errors import RankDied, RankFailed, StepAborted, StepFailed
from execution.ranks.control import RunStep, Stepped
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.step import ProcessedRow, Step, StepResult
from tests.contract.executors.executor_suite import CTE, TKG, prompt_inputs, token_inputs
from tests.hang_guard import HANG_S
from tests.ranks.toy import SLOTS, ToyBundle
from tests.ranks.toy_bundles import MakeToy
from tests.ranks.toy_groups import DECODE, PREFILL, loaded_group, step
from tests.service.execution.test_tensor_parallel import assert_death_ends_it, with_rank


@pytest.fixture
def picking(toy: MakeToy) -> ToyBundle:
    """Picks tokens on the device."""
    return toy("tokens", 0)


def decode(tokens: list[int], position: int, *, depends_on_previous: bool = False) -> Step:
    """A step of both rows, sampled with a number of its own; tokens that are not known yet are 0."""
    inputs = token_inputs([0, 0] if depends_on_previous else tokens, [position, position + 1], [0, 1])
    one = step(TKG, inputs, 2, params=(7.0, 0.95, 0.8), seed=position)
    return msgspec.structs.replace(one, depends_on_previous=depends_on_previous)


LEAVING = msgspec.structs.replace(decode([8, 14], 3), left=(0,))


def newest(result: StepResult) -> list[int]:
    """The one token of each row."""
    return [token for (token,) in result.tokens]


async def prefill_both(group: RankGroup) -> None:
    await group.run(step(CTE, prompt_inputs([5, 6, 7], 0)))
    await group.run(step(CTE, prompt_inputs([9, 10, 11, 12], 1)))


@pytest.fixture(
    params=[
        *((0, ranks) for ranks in (1, 2, 4)),
        *(pytest.param((1, ranks), marks=[pytest.mark.toolchain, pytest.mark.slow]) for ranks in (1, 2)),
    ],
    ids=str,
)
def picking_ranks(request: pytest.FixtureRequest, toy: MakeToy) -> ToyBundle:
    """A toy bundle like `picking`, for one rank or several."""
    level, tp_degree = request.param
    return toy("tokens", level, tp_degree)


async def test_async_steps_compute_what_they_compute_one_by_one(
    picking_ranks: ToyBundle, forkservers: RankForkservers
) -> None:
    async with loaded_group(picking_ranks.manifest, picking_ranks.blobs, forkservers) as (group, _):
        await prefill_both(group)
        expected = [await group.run(decode([8, 14], 3))]
        for position in range(4, 13):
            expected.append(await group.run(decode(newest(expected[-1]), position)))
        await group.zero_state(None)
        await prefill_both(group)
        results, under_way = [], await group.begin(decode([8, 14], 3))
        for position in range(4, 12):
            dependent = await group.begin(decode([], position, depends_on_previous=True))
            results.append(await under_way)
            under_way = dependent
        results.append(await under_way)
        # A step may also depend on one that has ended.
        results.append(await group.run(decode([], 12, depends_on_previous=True)))
        assert [one.tokens for one in results] == [one.tokens for one in expected]
        assert [one.top_logprobs for one in results] == [one.top_logprobs for one in expected]
        assert len({tuple(newest(one)) for one in results}) > 1


async def test_both_steps_under_way_come_before_what_needs_the_ranks_alone(
    picking: ToyBundle, forkservers: RankForkservers
) -> None:
    async with loaded_group(picking.manifest, picking.blobs, forkservers) as (group, (process,)):
        await prefill_both(group)
        before = await group.run(decode([8, 14], 3))
        expected = await group.run(decode(newest(before), 4))
        await group.stage_weights({0: picking.weights[1]})
        process.suspend()
        under_way = await group.begin(decode([8, 14], 3))
        swapping = asyncio.create_task(group.swap_weights())
        await asyncio.sleep(0)
        other = asyncio.create_task(group.run(PREFILL))
        await asyncio.sleep(0)
        dependent = await group.begin(decode([], 4, depends_on_previous=True))
        process.resume()
        assert (await under_way).tokens == before.tokens
        assert (await dependent).top_logprobs == expected.top_logprobs, "by the old weights"
        assert not swapping.done()
        assert not other.done()
        await swapping
        assert (await other).tokens == (await group.run(PREFILL)).tokens, "by the new weights"


async def test_callers_that_give_up_leave_both_steps_to_their_end(
    picking: ToyBundle, forkservers: RankForkservers
) -> None:
    async with loaded_group(picking.manifest, picking.blobs, forkservers) as (group, (process,)):
        await prefill_both(group)
        process.suspend()
        for one in (decode([8, 14], 3), decode([], 4, depends_on_previous=True)):
            (await group.begin(one)).cancel()
        last = asyncio.create_task(group.run(decode([8, 14], 3)))
        process.resume()
        assert (await last).tokens == (await group.run(decode([8, 14], 3))).tokens


@pytest.fixture
def eager(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0)


async def test_no_step_can_depend_on_one_that_failed(eager: ToyBundle, forkservers: RankForkservers) -> None:
    layout = eager.manifest.state
    shorter = tuple(msgspec.structs.replace(one, shape=(SLOTS + 1, 1, 7, 16)) for one in layout.tensors)
    manifest = msgspec.structs.replace(eager.manifest, state=msgspec.structs.replace(layout, tensors=shorter))
    async with loaded_group(manifest, eager.blobs, forkservers) as (group, _):
        failing = await group.begin(DECODE)
        dependent = await group.begin(msgspec.structs.replace(DECODE, depends_on_previous=True))
        with pytest.raises(StepFailed) as caught:
            await failing
        assert caught.value.reason == "STEP_FAILED"
        with pytest.raises(StepAborted, match="the previous step has no tokens"):
            await dependent
        await group.zero_state(None)
        assert not group.died.done()


# Several ranks


@pytest.fixture
def picking_pair(toy: MakeToy) -> ToyBundle:
    return toy("tokens", 0, 2)


async def test_a_step_that_depends_on_a_failed_one_fails_on_every_rank(
    picking_pair: ToyBundle, tmp_path: Path, forkservers: RankForkservers
) -> None:
    shards = picking_pair.shards[0]
    async with loaded_group(picking_pair.manifest, picking_pair.blobs, forkservers) as (group, _):
        before = await group.run(decode([8, 14], 3))
        await group.stage_weights({0: shards[0], 1: with_rank(shards[1], 99, tmp_path)})
        await group.swap_weights()
        async with asyncio.timeout(HANG_S):
            failing = await group.begin(decode([8, 14], 3))
            dependent = await group.begin(decode([], 4, depends_on_previous=True))
            with pytest.raises(StepFailed) as caught:
                await failing
            assert caught.value.reason == "STEP_FAILED", "the cause, not its consequence"
            with pytest.raises(StepAborted):
                await dependent
            await group.stage_weights(shards)
            await group.swap_weights()
            assert (await group.run(decode([8, 14], 3))).top_logprobs == before.top_logprobs


async def test_tokens_that_a_failed_step_left_are_not_picked(
    picking_ranks: ToyBundle, forkservers: RankForkservers
) -> None:
    manifest, blobs = picking_ranks.manifest, picking_ranks.blobs
    async with loaded_group(manifest, blobs, forkservers) as (group, _), asyncio.timeout(HANG_S):
        before = await group.run(decode([8, 14], 3))
        await group.run(LEAVING)
        # There are no tokens that it could depend on.
        failing = await group.begin(msgspec.structs.replace(LEAVING, depends_on_previous=True))
        picked = await group.pick([ProcessedRow(0)])
        with pytest.raises(StepAborted, match="the previous step has no tokens"):
            await failing
        with pytest.raises(StepAborted):
            await picked
        await group.begin(LEAVING)
        picked = await group.pick([ProcessedRow(0)])
        assert (await picked).tokens == before.tokens


@pytest.mark.parametrize("without", [0, 1])
async def test_a_rank_that_cannot_run_a_dependent_step_leaves_no_caller_waiting(
    picking_pair: ToyBundle, without: int, forkservers: RankForkservers
) -> None:
    async with loaded_group(picking_pair.manifest, picking_pair.blobs, forkservers) as (group, _):
        before = await group.run(decode([8, 14], 3))
        # As a rank that fails behind its last collective: it has no tokens, and the other has.
        lone = RunStep(tag="none", memory_set=0, depends_on_previous=False, top_logprobs=None, return_logits=False)
        with pytest.raises(RankFailed):
            await group._ranks[without].ask(lone, Stepped)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(StepAborted):
                await group.run(decode([], 4, depends_on_previous=True))
            assert (await group.run(decode([8, 14], 3))).top_logprobs == before.top_logprobs


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_killed_under_two_steps_ends_the_group(
    picking_pair: ToyBundle, victim: int, forkservers: RankForkservers
) -> None:
    async with loaded_group(picking_pair.manifest, picking_pair.blobs, forkservers) as (group, processes):
        processes[victim].suspend()
        under_way = await group.begin(decode([8, 14], 3))
        dependent = asyncio.create_task(group.run(decode([], 4, depends_on_previous=True)))
        await asyncio.sleep(0.1)
        assert not under_way.done()
        await assert_death_ends_it(group, processes, victim, dependent)
        with pytest.raises(RankDied, match=f"rank {victim} died: SIGKILL"):
            await under_way
