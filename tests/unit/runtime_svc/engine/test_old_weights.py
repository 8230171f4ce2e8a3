"""Requests that end with old weights while others run with new ones, and old weights that come back."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from execution.errors import RankDied, WeightsInvalid, WeightsNotStaged
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from runtime_svc.engine.operations import InFlightPolicy, WeightsReceipt
from runtime_svc.engine.request import FinishReason
from runtime_svc.engine.weights import WeightSwap
from runtime_svc.errors import OldWeightsInUse
from tests.ranks.engines import (
    BLOCKS,
    CACHING,
    FLAGS,
    NEW_BIAS,
    EngineHarness,
    StartEngine,
    collect,
    collect_sequences,
    epochs_of,
    finished_of,
    is_async,
    swap,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import BIAS, expected_tokens

__all__ = ["is_async"]

FINISH = InFlightPolicy.FINISH_ON_OLD


async def swap_under(harness: EngineHarness, shards: dict[int, Path], **options: Any) -> WeightsReceipt:
    """Swaps in new weights in the middle of a step."""
    await harness.hold()
    task = await swap(harness, shards, FINISH, **options)
    harness.ranks.gate.set()
    return await task


def put_back(harness: EngineHarness, policy: InFlightPolicy, **options: Any) -> asyncio.Task[WeightsReceipt]:
    """Begins to put the old weights back in use."""
    weights = harness.engine.weights
    assert weights.old is not None
    # It would fail if it staged any.
    harness.ranks.stage_failure = WeightsInvalid(0, "the file is gone")
    return asyncio.create_task(weights.swap(WeightSwap(weights.old.launcher, None, policy, **options)))


@pytest.mark.parametrize("layout", [{}, CACHING], ids=["slots", "blocks"])
async def test_each_request_has_the_weights_that_it_began_with(
    start_engine: StartEngine, shards: dict[int, Path], layout: dict[str, Any]
) -> None:
    harness, released = await start_engine(**layout), list[str]()
    prompt = list(range(5, 17))
    old = harness.submit(prompt, max_new_tokens=40)
    receipt = await swap_under(harness, shards, on_released=lambda: released.append("old"))
    assert (receipt.previous_weight_epoch, receipt.weight_epoch, receipt.aborted_requests) == (1, 2, 0)
    new = [harness.submit(prompt, max_new_tokens=6) for _ in range(2)]
    for events in [await collect(stream) for stream in new]:
        assert tokens_of(events) == expected_tokens(prompt, 6, bias=NEW_BIAS)
        assert {event.weight_epoch for event in events} == {2}
    assert harness.engine.scheduler.num_old == 1, "the new ones have not waited for it"
    assert not released
    events = await collect(old)
    assert tokens_of(events) == expected_tokens(prompt, 40)
    assert {event.weight_epoch for event in events} == {1}
    await wait_until(lambda: harness.engine.weights.old is None)
    assert harness.ranks.staged_bias is None
    assert released == ["old"]
    assert tokens_of(await collect(harness.submit(prompt))) == expected_tokens(prompt, 40, bias=NEW_BIAS)


async def test_steps_of_the_two_alternate(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine()
    old = harness.submit([5], max_new_tokens=30)
    await harness.hold()
    task = await swap(harness, shards, FINISH)
    new = harness.submit([6], max_new_tokens=8)
    harness.ranks.gate.set()
    await task
    assert epochs_of(await collect(new)) == [2] * 8
    await collect(old)
    sides = [step.with_old for step in harness.ranks.steps]
    first = sides.index(True)
    both = sides[first : first + 16]
    assert all(one != next_ for one, next_ in pairwise(both))


async def test_a_long_prompt_of_new_weights_comes_in_chunks(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine(EngineConfig(chunks=ChunkLimits(8)), flags=FLAGS, prompt_buckets=(8, 32))
    old = harness.submit([5], max_new_tokens=30)
    await harness.hold()
    task = await swap(harness, shards, FINISH)
    new = harness.submit(list(range(5, 35)), max_new_tokens=2)
    harness.ranks.gate.set()
    await task
    assert tokens_of(await collect(new)) == expected_tokens(list(range(5, 35)), 2, bias=NEW_BIAS)
    assert tokens_of(await collect(old)) == expected_tokens([5], 30)
    chunks = [step for step in harness.ranks.steps if not step.with_old and "num_tokens" in step.inputs]
    assert max(step.inputs["num_tokens"][0] for step in chunks) == 8


async def test_sequences_of_a_call_stay_together(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine(num_slots=2)
    old = harness.submit_call([5], 3, max_new_tokens=8)
    await swap_under(harness, shards)
    new = harness.submit([6], max_new_tokens=8)
    for events in await collect_sequences(old):
        assert tokens_of(events) == expected_tokens([5], 8)
        assert set(epochs_of(events)) == {1}
    assert tokens_of(await collect(new)) == expected_tokens([6], 8, bias=NEW_BIAS)


async def test_both_make_progress_where_blocks_are_short(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    """The newest ones give their blocks back and are computed anew, with the weights that they had."""
    harness = await start_engine(step_s=0.001, **CACHING | {"num_blocks": 18})
    prompts = [list(range(first, first + 8)) for first in (5, 25)]
    old = [harness.submit(prompt, max_new_tokens=40) for prompt in prompts]
    await wait_until(lambda: harness.engine.scheduler.num_running == 2)
    await swap_under(harness, shards)
    new = [harness.submit(prompt, max_new_tokens=40) for prompt in prompts]
    for streams, bias in ((old, BIAS), (new, NEW_BIAS)):
        for stream, prompt in zip(streams, prompts, strict=True):
            assert tokens_of(await collect(stream)) == expected_tokens(prompt, 40, bias=bias)
    assert harness.engine.scheduler.statistics.preemptions


async def test_a_session_goes_on_only_with_its_weights(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine(**BLOCKS)
    old = harness.submit([5], max_new_tokens=8, session="s")
    await swap_under(harness, shards)
    told = [5, *tokens_of(await collect(old))]
    assert told == [5, *expected_tokens([5], 8)]
    new = finished_of(events := await collect(harness.submit(told, max_new_tokens=4, session="s")))
    assert tokens_of(events) == expected_tokens(told, 4, bias=NEW_BIAS)
    assert new.usage.cached_prompt_tokens == 0


@pytest.mark.parametrize("policy", [InFlightPolicy.WAIT, FINISH])
async def test_kept_weights_come_back_without_a_file(
    start_engine: StartEngine, shards: dict[int, Path], policy: InFlightPolicy
) -> None:
    harness, released = await start_engine(), list[int]()
    await (await swap(harness, shards, policy, keep_old=True, on_released=lambda: released.append(1)))
    for epoch, bias in ((3, BIAS), (4, NEW_BIAS), (5, BIAS)):
        assert harness.engine.weights.old is not None
        assert harness.engine.weights.old.weight_epoch == epoch - 2
        receipt = await put_back(harness, policy, keep_old=True, on_released=partial(released.append, epoch - 1))
        assert receipt.weight_epoch == epoch
        assert tokens_of(await collect(harness.submit([5]))) == expected_tokens([5], 40, bias=bias)
    assert not released
    await harness.engine.weights.give_up_old()
    assert released == [4]
    assert harness.ranks.staged_bias is None


async def test_a_rollback_finds_requests_of_the_old_weights_running(
    start_engine: StartEngine, shards: dict[int, Path]
) -> None:
    harness = await start_engine(num_slots=4)
    first = harness.submit([5], max_new_tokens=40)
    await swap_under(harness, shards)
    second = harness.submit([6], max_new_tokens=40)
    await wait_until(lambda: harness.engine.scheduler.num_running == 2)
    await harness.hold()
    task = put_back(harness, FINISH)
    await asyncio.sleep(0)
    third = harness.submit([7], max_new_tokens=40)
    harness.ranks.gate.set()
    assert (await task).weight_epoch == 3
    assert harness.engine.scheduler.num_old == 1, "the first one has the weights in use again"
    for stream, prompt, bias, epoch in ((first, 5, BIAS, 1), (second, 6, NEW_BIAS, 2), (third, 7, BIAS, 3)):
        events = await collect(stream)
        assert tokens_of(events) == expected_tokens([prompt], 40, bias=bias)
        assert set(epochs_of(events)) == {epoch}
    await wait_until(lambda: harness.engine.weights.old is None)


async def test_a_third_set_waits_for_the_old_ones_to_end(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine()
    old = harness.submit([5], max_new_tokens=20)
    await swap_under(harness, shards)
    with pytest.raises(OldWeightsInUse, match="1 requests run on with the weights of epoch 1") as caught:
        await harness.engine.weights.give_up_old()
    assert caught.value.metadata == {"num_requests": "1", "weight_epoch": "1"}
    assert tokens_of(await collect(old)) == expected_tokens([5], 20)
    await harness.engine.weights.give_up_old()
    await (await swap(harness, shards, FINISH))
    assert harness.engine.weight_epoch == 3


async def test_a_withdrawn_rollback_leaves_the_old_weights_to_their_requests(
    start_engine: StartEngine, shards: dict[int, Path]
) -> None:
    harness = await start_engine()
    old = harness.submit([5], max_new_tokens=20)
    await swap_under(harness, shards)
    await harness.hold()
    task = put_back(harness, InFlightPolicy.WAIT)
    await asyncio.sleep(0)
    task.cancel()
    harness.ranks.gate.set()
    assert tokens_of(await collect(old)) == expected_tokens([5], 20)
    await wait_until(lambda: harness.engine.weights.old is None)
    assert harness.engine.weight_epoch == 2


async def test_a_rollback_that_waits_outlives_the_last_request_of_the_old_weights(
    start_engine: StartEngine, shards: dict[int, Path]
) -> None:
    harness = await start_engine()
    old = harness.submit([5], max_new_tokens=10)
    await swap_under(harness, shards)
    new = harness.submit([6], max_new_tokens=40)
    await wait_until(lambda: harness.engine.scheduler.num_running == 2)
    task = put_back(harness, InFlightPolicy.WAIT)
    assert tokens_of(await collect(old)) == expected_tokens([5], 10)
    assert tokens_of(await collect(new)) == expected_tokens([6], 40, bias=NEW_BIAS)
    assert (await task).weight_epoch == 3
    assert tokens_of(await collect(harness.submit([5]))) == expected_tokens([5], 40)


async def test_lost_ranks_take_the_old_weights_along(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness, released = await start_engine(step_s=0.001, num_slots=2), list[str]()
    streams = [harness.submit([5]), harness.submit([6])]
    await wait_until(lambda: harness.engine.scheduler.num_running == 2)
    await swap_under(harness, shards, keep_old=True, on_released=lambda: released.append("old"))
    waiting = harness.submit([7])
    await harness.hold()
    task = put_back(harness, InFlightPolicy.WAIT)
    await asyncio.sleep(0)
    harness.ranks.die()
    for stream in streams:
        finish = finished_of(await collect(stream)).finish
        assert (finish.reason, type(finish.error)) == (FinishReason.ERROR, RankDied)
    with pytest.raises(WeightsNotStaged):
        await task
    assert released == ["old"]
    assert harness.engine.weights.old is None
    assert tokens_of(await collect(waiting)) == expected_tokens([7], 40, bias=NEW_BIAS)


async def test_requests_that_continue_leave_the_old_weights(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine()
    old = harness.submit([5], max_new_tokens=40)
    await swap_under(harness, shards)
    await harness.hold()
    task = put_back(harness, InFlightPolicy.CONTINUE, keep_kv=True)
    await asyncio.sleep(0)
    harness.ranks.gate.set()
    await task
    await wait_until(lambda: harness.engine.weights.old is None)
    events = await collect(old)
    assert tokens_of(events) == expected_tokens([5], 40)
    assert set(epochs_of(events)) == {1, 3}
