"""Resets, weight swaps and dead ranks under a running engine."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from bundle.errors import BlobCorrupt
from execution.errors import RankDied, RankHung, StepFailed, WeightsInvalid
from runtime_svc.engine.engine import Engine, EngineState
from runtime_svc.engine.operations import MAX_OPERATIONS, InFlightPolicy
from runtime_svc.engine.request import FinishReason
from runtime_svc.errors import EngineFailed, QueueFull, RequestsInFlight
from tests.hang_guard import HANG_S
from tests.ranks.engines import (
    NEW_BIAS,
    StartEngine,
    collect,
    finished_of,
    is_async,
    swap,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import STATE_BYTES, expected_tokens

__all__ = ["is_async"]


async def test_reset_of_an_idle_engine_zeroes_everything(start_engine: StartEngine) -> None:
    harness = await start_engine()
    await collect(harness.submit([5], max_new_tokens=3))
    assert not harness.ranks.is_zeroed
    receipt = await harness.engine.reset_kv_cache(InFlightPolicy.WAIT)
    assert harness.ranks.is_zeroed
    assert (receipt.affected_sequences, receipt.zeroed_bytes, receipt.weight_epoch) == (0, STATE_BYTES, 1)
    assert receipt.duration_s >= 0


async def test_reset_that_waits_lets_running_finish_and_queues_new_ones(start_engine: StartEngine) -> None:
    harness = await start_engine()
    running = harness.submit([5], max_new_tokens=10)
    await harness.hold()
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.WAIT))
    await asyncio.sleep(0)
    queued = harness.submit([6], max_new_tokens=5)
    harness.ranks.gate.set()
    receipt = await reset
    assert receipt.affected_sequences == 0
    assert tokens_of(await collect(running)) == expected_tokens([5], 10)
    assert tokens_of(await collect(queued)) == expected_tokens([6], 5)
    resets_before_queued = [step.tag.startswith("context") for step in harness.ranks.steps]
    assert resets_before_queued == [True] + [False] * 9 + [True] + [False] * 4, "the new one ran after the old one"


async def test_reset_that_aborts_ends_running_and_spares_waiting(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=1)
    running = harness.submit([5])
    waiting = harness.submit([6], max_new_tokens=5)
    await harness.hold()
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.ABORT))
    await asyncio.sleep(0)
    harness.ranks.gate.set()
    receipt = await reset
    assert receipt.affected_sequences == 1
    assert finished_of(await collect(running)).finish.reason is FinishReason.ABORTED
    assert tokens_of(await collect(waiting)) == expected_tokens([6], 5)


async def test_reset_that_refuses_changes_nothing(start_engine: StartEngine) -> None:
    harness = await start_engine()
    running = harness.submit([5])
    await harness.hold()
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.REFUSE))
    await asyncio.sleep(0)
    harness.ranks.gate.set()
    with pytest.raises(RequestsInFlight):
        await reset
    assert tokens_of(await collect(running)) == expected_tokens([5], 40)


async def test_withdrawn_operation_does_not_happen(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=1)
    running = harness.submit([5])
    waiting = harness.submit([6], max_new_tokens=5)
    await harness.hold()
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.WAIT))
    await asyncio.sleep(0)
    reset.cancel()
    harness.ranks.gate.set()
    assert tokens_of(await collect(running)) == expected_tokens([5], 40)
    assert tokens_of(await collect(waiting)) == expected_tokens([6], 5)
    assert not harness.ranks.is_zeroed


async def test_swap_raises_the_epoch_and_changes_the_tokens(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine()
    before = await collect(harness.submit([5], max_new_tokens=4))
    receipt = await (await swap(harness, shards, InFlightPolicy.WAIT))
    assert (receipt.previous_weight_epoch, receipt.weight_epoch, receipt.aborted_requests) == (1, 2, 0)
    assert receipt.pause_s >= 0
    assert harness.engine.weights.launcher.weights_ref == "fake:v2"
    assert harness.ranks.is_zeroed
    after = await collect(harness.submit([5], max_new_tokens=4))
    assert tokens_of(before) == expected_tokens([5], 4)
    assert tokens_of(after) == expected_tokens([5], 4, bias=NEW_BIAS)
    assert {event.weight_epoch for event in before} == {1}
    assert {event.weight_epoch for event in after} == {2}


async def test_swap_that_waits_serves_old_to_running_and_new_to_queued(
    start_engine: StartEngine, shards: dict[int, Path]
) -> None:
    harness = await start_engine()
    running = harness.submit([5], max_new_tokens=10)
    await harness.hold()
    task = await swap(harness, shards, InFlightPolicy.WAIT)
    queued = harness.submit([6], max_new_tokens=5)
    harness.ranks.gate.set()
    await task
    old, new = await collect(running), await collect(queued)
    assert tokens_of(old) == expected_tokens([5], 10)
    assert {event.weight_epoch for event in old} == {1}
    assert tokens_of(new) == expected_tokens([6], 5, bias=NEW_BIAS)
    assert [event.weight_epoch for event in new] == [1] + [2] * 6, "accepted under the old weights, computed by the new"


@pytest.mark.parametrize("policy", [InFlightPolicy.ABORT, InFlightPolicy.REFUSE])
async def test_swap_policies(start_engine: StartEngine, shards: dict[int, Path], policy: InFlightPolicy) -> None:
    harness = await start_engine()
    running = harness.submit([5], max_new_tokens=20)
    await harness.hold()
    task = await swap(harness, shards, policy)
    if policy is InFlightPolicy.REFUSE:
        with pytest.raises(RequestsInFlight):
            harness.engine.check_policy(policy)
        harness.ranks.gate.set()
        with pytest.raises(RequestsInFlight):
            await task
        assert harness.ranks.staged_bias is None
        assert tokens_of(await collect(running)) == expected_tokens([5], 20)
        assert harness.engine.weight_epoch == 1
    else:
        harness.ranks.gate.set()
        assert (await task).aborted_requests == 1
        assert finished_of(await collect(running)).finish.reason is FinishReason.ABORTED
        assert harness.engine.weight_epoch == 2


async def test_withdrawn_swap_discards_what_was_staged(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine()
    running = harness.submit([5], max_new_tokens=10)
    await harness.hold()
    task = await swap(harness, shards, InFlightPolicy.WAIT)
    task.cancel()
    harness.ranks.gate.set()
    assert tokens_of(await collect(running)) == expected_tokens([5], 10)
    assert harness.ranks.staged_bias is None
    assert harness.engine.weight_epoch == 1


@pytest.mark.parametrize("policy", InFlightPolicy)
async def test_operations_that_abort_give_a_step_less_time(
    start_engine: StartEngine, shards: dict[int, Path], policy: InFlightPolicy
) -> None:
    harness = await start_engine()
    harness.submit([5], max_new_tokens=3)
    await harness.hold()
    begin = (harness.engine.reset_kv_cache(policy), harness.engine.weights.stage(shards, policy))
    tasks = [asyncio.create_task(one) for one in begin]
    await asyncio.sleep(0)
    assert harness.ranks.num_hurrying == (2 if policy is InFlightPolicy.ABORT else 0)
    tasks.append(await swap(harness, shards, policy))
    harness.ranks.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert harness.ranks.num_hurrying == 0


async def test_hung_ranks_are_restarted_and_counted(start_engine: StartEngine) -> None:
    harness = await start_engine()
    running = harness.submit([5], max_new_tokens=40)
    await harness.hold()
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.ABORT))
    await asyncio.sleep(0)
    hung = RankHung(0, "RunStep", 3.0, "is stopped")
    harness.ranks.die(hung)
    assert finished_of(await collect(running)).finish.error is hung
    assert (await reset).affected_sequences == 0
    statistics = harness.engine.scheduler.statistics
    assert (statistics.rank_hangs, statistics.rank_restarts) == (1, 1)


async def test_weights_that_cannot_be_staged_leave_nothing(start_engine: StartEngine, tmp_path: Path) -> None:
    harness = await start_engine()
    staging = asyncio.create_task(harness.engine.weights.stage({0: tmp_path / "nothing"}, InFlightPolicy.WAIT))
    await asyncio.sleep(0)
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    assert harness.ranks.num_discarded == 1
    harness.ranks.stage_failure = WeightsInvalid(0, "too short")
    with pytest.raises(WeightsInvalid):
        await harness.engine.weights.stage({0: tmp_path / "nothing"}, InFlightPolicy.WAIT)
    assert harness.ranks.num_discarded == 2


async def test_dead_rank_ends_its_streams_and_waiting_requests_are_served(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=1)
    running = harness.submit([5], max_new_tokens=40)
    waiting = harness.submit([6], max_new_tokens=5)
    await harness.hold()
    first = harness.ranks
    first.die()
    finished = finished_of(await asyncio.wait_for(collect(running), HANG_S))
    assert finished.finish.reason is FinishReason.ERROR
    assert isinstance(finished.finish.error, RankDied)
    assert tokens_of(await collect(waiting)) == expected_tokens([6], 5)
    assert first.is_closed
    assert harness.ranks is not first
    assert harness.engine.state is EngineState.READY


async def test_restart_loads_the_weights_in_use(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine()
    await (await swap(harness, shards, InFlightPolicy.WAIT))
    harness.ranks.die()
    events = await collect(harness.submit([5], max_new_tokens=4))
    assert tokens_of(events) == expected_tokens([5], 4, bias=NEW_BIAS)
    assert {event.weight_epoch for event in events} == {2}


async def test_swap_stages_again_where_ranks_were_restarted(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine()
    harness.submit([5])
    await harness.hold()
    task = await swap(harness, shards, InFlightPolicy.WAIT)
    harness.ranks.die()
    assert (await task).weight_epoch == 2
    assert harness.ranks.bias == NEW_BIAS


async def test_restart_is_tried_again(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.engine.ranks.RESTART_DELAYS_S", (0.0, 0.01, 0.01))
    harness = await start_engine()
    harness.launcher.failures = [BlobCorrupt("sha256:1", "sha256:2"), RankDied(0, 1)]
    harness.ranks.die()
    await wait_until(lambda: harness.engine.state is EngineState.RECOVERING)
    assert tokens_of(await collect(harness.submit([5], max_new_tokens=2))) == expected_tokens([5], 2)


async def test_a_shortage_is_outlasted(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.engine.ranks.RESTART_DELAYS_S", (0.0,))
    monkeypatch.setattr("bundle.host.shortage._FIRST_DELAY_S", 0.001)
    harness = await start_engine()
    lacks = (errno.EMFILE, errno.ENOMEM, errno.ENFILE, errno.ENOBUFS, errno.ENOSPC)
    harness.launcher.failures = [OSError(number, os.strerror(number)) for number in lacks]
    waiting = harness.submit([5], max_new_tokens=2)
    harness.ranks.die()
    await wait_until(lambda: "short of" in str(harness.engine.shortage))
    assert harness.engine.state is EngineState.RECOVERING
    assert tokens_of(await collect(waiting)) == expected_tokens([5], 2)
    assert harness.engine.shortage is None


async def test_engine_fails_where_ranks_stay_down(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.engine.ranks.RESTART_DELAYS_S", (0.0, 0.01))
    harness = await start_engine(num_slots=1)
    harness.launcher.failures = [BlobCorrupt("sha256:1", "sha256:2") for _ in range(2)]
    harness.submit([5])
    waiting = harness.submit([5])
    await harness.hold()
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.WAIT))
    await asyncio.sleep(0)
    harness.ranks.die()
    assert isinstance(finished_of(await collect(waiting)).finish.error, BlobCorrupt)
    with pytest.raises(BlobCorrupt):
        await reset
    assert harness.engine.state is EngineState.FAILED


@pytest.mark.parametrize(
    ("raised", "error"), [(StepFailed("t", "out of memory"), StepFailed), (ZeroDivisionError(), EngineFailed)]
)
async def test_a_failed_step_starts_anew_and_a_bug_of_ours_does_not(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, raised: Exception, error: type[Exception]
) -> None:
    harness = await start_engine()
    first = harness.ranks

    async def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(first, "_run", fail)
    finish = finished_of(await collect(harness.submit([5]))).finish
    assert finish.reason is FinishReason.ERROR
    assert isinstance(finish.error, error)
    if error is EngineFailed:
        assert harness.engine.state is EngineState.FAILED
        return
    assert tokens_of(await collect(harness.submit([5], max_new_tokens=2))) == expected_tokens([5], 2)
    assert harness.ranks is not first


async def test_rank_that_dies_during_a_reset(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start_engine()
    await collect(harness.submit([5], max_new_tokens=2))
    zero_state = harness.ranks.zero_state

    async def die_and_zero(slots: None) -> int:
        harness.ranks.die()
        return await zero_state(slots)

    monkeypatch.setattr(harness.ranks, "zero_state", die_and_zero)
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.WAIT))
    with pytest.raises(RankDied):
        await reset
    assert tokens_of(await collect(harness.submit([5], max_new_tokens=2))) == expected_tokens([5], 2)


async def test_engine_closes_while_it_restarts(start_engine: StartEngine) -> None:
    harness = await start_engine()
    harness.launcher.failures = [RankDied(0, 1)] * 2
    harness.ranks.die()
    await wait_until(lambda: harness.engine.state is EngineState.RECOVERING)
    engine: Engine = harness.engine
    await asyncio.wait_for(engine.close(), HANG_S)


async def test_operations_that_wait_are_bounded(start_engine: StartEngine) -> None:
    harness = await start_engine()
    harness.ranks.gate.clear()
    stream = harness.submit([5], max_new_tokens=3)
    await wait_until(lambda: len(harness.ranks.steps) == 1)
    resets = [asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.WAIT)) for _ in range(MAX_OPERATIONS)]
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull):
        await harness.engine.reset_kv_cache(InFlightPolicy.WAIT)
    harness.ranks.gate.set()
    await collect(stream)
    await asyncio.gather(*resets)
