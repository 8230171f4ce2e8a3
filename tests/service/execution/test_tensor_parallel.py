"""Several real rank processes that compute together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from bundle.manifest import Manifest
from execution.errors import (
    CollectivesMissing,
    RankDied,
    StepAborted,
    StepFailed,
    StepInvalid,
    WeightsAwaited,
    WeightsInvalid,
    WeightsNotStaged,
)
from execution.ranks.control import DiscardStaged, Done
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.step import Step
from tests.contract.executors.executor_suite import CTE, TKG, Reference, prompt_inputs, token_inputs
from tests.hang_guard import HANG_S
from tests.ranks.toy import SLOTS, ToyBundle
from tests.ranks.toy_bundles import MakeToy
from tests.ranks.toy_groups import DECODE, PREFILL, loaded_group, rank_processes, start, step
from tests.running_time import running_time

#: Compiled toys of two ranks take half a minute of g++; parity's rows have compiled ranks, too.
COMPILED = (pytest.mark.toolchain, pytest.mark.slow)


@pytest.fixture(params=[(0, 2), (0, 4), pytest.param((1, 2), marks=COMPILED)], ids=str)
def bundle(request: pytest.FixtureRequest, toy: MakeToy) -> ToyBundle:
    level, tp_degree = request.param
    return toy("logits", level, tp_degree)


async def test_ranks_compute_what_the_whole_model_computes(bundle: ToyBundle, forkservers: RankForkservers) -> None:
    reference = Reference(0)
    steps = [
        (CTE, prompt_inputs([5, 6, 7], 0)),
        (CTE, prompt_inputs([9, 10, 11, 12, 13], 1)),
        (TKG, token_inputs([8, 14], [3, 5], [0, 1])),
        (TKG, token_inputs([9, 15], [4, 6], [0, 1])),
    ]
    async with loaded_group(bundle.manifest, bundle.blobs, forkservers) as (group, _):
        await group.warm_up()
        for tag, inputs in steps:
            result = await group.run(Step(tag, step(tag, inputs).inputs, 3, return_logits=True))
            expected = reference.run(inputs)
            assert result.logits is not None
            logits = torch.frombuffer(result.logits, dtype=torch.float32).view(result.logits.shape)
            torch.testing.assert_close(logits, expected)
            assert result.tokens == expected.argmax(-1, keepdim=True).tolist()
            assert result.top_ids == expected.topk(3).indices[:, None].tolist()
        assert group.state_bytes == await group.zero_state(None)


@pytest.fixture
def pair(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0, 2)


@pytest.fixture(params=[0, pytest.param(1, marks=COMPILED)], ids=["O0", "O1"])
def each_pair(request: pytest.FixtureRequest, toy: MakeToy) -> ToyBundle:
    return toy("logits", request.param, 2)


def with_rank(path: Path, rank: int, directory: Path) -> Path:
    """Weights that name another rank than the one they are for."""
    wrong = load_file(path) | {"rank": torch.tensor([rank], dtype=torch.int32)}
    save_file(wrong, directory / "wrong.safetensors")
    return directory / "wrong.safetensors"


async def test_a_rank_that_fails_a_step_leaves_nobody_waiting(
    pair: ToyBundle, forkservers: RankForkservers, tmp_path: Path
) -> None:
    shards = pair.shards[0]
    async with loaded_group(pair.manifest, pair.blobs, forkservers) as (group, _):
        before = await group.run(PREFILL)
        await group.stage_weights({0: shards[0], 1: with_rank(shards[1], 99, tmp_path)})
        await group.swap_weights()
        for call in (partial(group.run, PREFILL), group.warm_up, partial(group.run, DECODE)):
            async with asyncio.timeout(HANG_S):
                with pytest.raises(StepFailed) as caught:
                    await call()
            assert caught.value.reason == "STEP_FAILED", "the cause, not what followed from it"
        await group.stage_weights(shards)
        await group.swap_weights()
        assert (await group.run(PREFILL)).tokens == before.tokens


async def test_an_aborted_collective_fails_the_step_and_not_the_next(
    each_pair: ToyBundle, forkservers: RankForkservers
) -> None:
    async with loaded_group(each_pair.manifest, each_pair.blobs, forkservers) as (group, processes):
        before = await group.run(PREFILL)
        processes[1].suspend()
        waiting = asyncio.create_task(group.run(PREFILL))
        await asyncio.sleep(0.1)
        assert group._collectives is not None
        group._collectives.abort()
        processes[1].resume()
        async with asyncio.timeout(HANG_S):
            with pytest.raises(StepAborted, match="another rank failed"):
                await waiting
        assert (await group.run(PREFILL)).tokens == before.tokens


async def test_inputs_that_all_ranks_refuse(pair: ToyBundle, forkservers: RankForkservers) -> None:
    async with loaded_group(pair.manifest, pair.blobs, forkservers) as (group, _):
        with pytest.raises(StepInvalid, match=r"inputs\[seq_ids\]"):
            await group.run(step(CTE, prompt_inputs([5], SLOTS + 1)))
        await group.run(PREFILL)


# Weights


async def test_weights_are_staged_on_all_ranks_or_none(
    pair: ToyBundle, forkservers: RankForkservers, tmp_path: Path
) -> None:
    async with loaded_group(pair.manifest, pair.blobs, forkservers) as (group, _):
        before = await group.run(PREFILL)
        await group.stage_weights(pair.shards[1])
        with pytest.raises(WeightsInvalid, match="FileNotFoundError"):
            await group.stage_weights({0: pair.shards[1][0], 1: tmp_path / "absent"})
        with pytest.raises(WeightsNotStaged):
            await group.swap_weights()
        assert (await group.run(PREFILL)).tokens == before.tokens
        await group.stage_weights(pair.shards[1])
        await group.swap_weights()
        after = await group.run(step(CTE, prompt_inputs([5, 6, 7], 0), 0))
        logprobs = Reference(1).run(prompt_inputs([5, 6, 7], 0)).log_softmax(-1)
        torch.testing.assert_close(torch.tensor(after.logprobs), logprobs.amax(-1, keepdim=True))
        await group.stage_weights(pair.shards[0])
        await group.discard_staged()
        with pytest.raises(WeightsNotStaged):
            await group.swap_weights()


async def test_old_weights_take_turns_with_the_new_ones(each_pair: ToyBundle, forkservers: RankForkservers) -> None:
    async with loaded_group(each_pair.manifest, each_pair.blobs, forkservers) as (group, _):
        with pytest.raises(WeightsNotStaged):
            await group.run(msgspec.structs.replace(PREFILL, with_old=True))
        await group.stage_weights(each_pair.shards[1])
        await group.swap_weights(keeps_old=True)
        for seed in (0, 1, 0, 1):
            result = await group.run(msgspec.structs.replace(PREFILL, with_old=not seed))
            assert result.tokens == Reference(seed).run(prompt_inputs([5, 6, 7], 0)).argmax(-1, keepdim=True).tolist()
        await group.swap_weights()
        result = await group.run(PREFILL)
        assert result.tokens == Reference(0).run(prompt_inputs([5, 6, 7], 0)).argmax(-1, keepdim=True).tolist()


async def test_ranks_that_swap_apart_end(pair: ToyBundle, forkservers: RankForkservers) -> None:
    async with loaded_group(pair.manifest, pair.blobs, forkservers) as (group, _):
        # As no caller can: one rank has weights to swap in, the other has none.
        await group.stage_weights(pair.shards[1])
        await group._ranks[1].ask(DiscardStaged(), Done)
        with pytest.raises(RankDied, match="rank 1 died"):
            await group.swap_weights()
        assert group.died.done()


async def test_a_bundle_without_weights_waits_for_some(each_pair: ToyBundle, forkservers: RankForkservers) -> None:
    async with loaded_group(without_weights(each_pair.manifest), each_pair.blobs, forkservers) as (group, _):
        assert group.weights_bytes == 0
        for call in (group.warm_up(), group.run(PREFILL)):
            with pytest.raises(WeightsAwaited):
                await call
        await group.stage_weights(each_pair.shards[0])
        with pytest.raises(WeightsAwaited):
            await group.run(PREFILL)
        await group.swap_weights()
        await group.warm_up()
        result = await group.run(PREFILL)
        assert result.tokens == Reference(0).run(prompt_inputs([5, 6, 7], 0)).argmax(-1, keepdim=True).tolist()


def without_weights(manifest: Manifest) -> Manifest:
    (weight_set,) = manifest.weight_sets
    shards = tuple(msgspec.structs.replace(shard, blob=None, size_bytes=0) for shard in weight_set.shards)
    return msgspec.structs.replace(manifest, weight_sets=(msgspec.structs.replace(weight_set, shards=shards),))


# Deaths


#: What a caller waits for while a rank is killed.
ACTS: dict[str, Callable[[RankGroup], Awaitable[object]]] = {
    "step": lambda group: group.run(PREFILL),
    "swap": lambda group: group.swap_weights(),
    "zeroing": lambda group: group.zero_state(None),
}


@pytest.mark.parametrize(("act", "victim"), [("step", 0), ("swap", 0), ("zeroing", 1)])
async def test_a_killed_rank_ends_the_group(
    pair: ToyBundle, forkservers: RankForkservers, act: str, victim: int
) -> None:
    """The victim stands still, so that it is killed while the others wait for it, in a collective or out of one."""
    async with loaded_group(pair.manifest, pair.blobs, forkservers) as (group, processes):
        await group.stage_weights(pair.shards[1])
        processes[victim].suspend()
        waiting = asyncio.ensure_future(ACTS[act](group))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await assert_death_ends_it(group, processes, victim, waiting)


async def run_steps(group: RankGroup) -> None:
    while True:
        await group.run(DECODE)


async def test_a_rank_killed_among_running_steps(pair: ToyBundle, forkservers: RankForkservers) -> None:
    async with loaded_group(pair.manifest, pair.blobs, forkservers) as (group, processes):
        waiting = asyncio.create_task(run_steps(group))
        await asyncio.sleep(0.3)
        await assert_death_ends_it(group, processes, 1, waiting)


async def assert_death_ends_it(
    group: RankGroup, processes: list[psutil.Process], victim: int, waiting: asyncio.Future[object]
) -> None:
    processes[victim].kill()
    with running_time() as taken:
        async with asyncio.timeout(HANG_S):
            for call in (waiting, group.run(PREFILL)):
                with pytest.raises(RankDied, match=f"rank {victim} died: SIGKILL"):
                    await call
            assert (await group.died).rank == victim
    assert taken.s < 2
    gone, alive = await asyncio.to_thread(psutil.wait_procs, processes, HANG_S)
    assert (len(gone), alive) == (len(processes), [])


async def test_a_rank_killed_while_it_loads(pair: ToyBundle, forkservers: RankForkservers) -> None:
    before = rank_processes()
    group = await start(pair.manifest, pair.blobs, forkservers, [])
    processes = sorted(rank_processes() - before, key=lambda process: process.pid)
    processes[1].suspend()
    loading = asyncio.create_task(group.load())
    await asyncio.sleep(0.1)
    processes[1].kill()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(RankDied, match="rank 1 died: SIGKILL"):
            await loading
    assert not any(process.is_running() for process in processes)


async def test_ranks_without_the_native_library(pair: ToyBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("execution.collectives.memory.load_collective_library", lambda: None)
    with pytest.raises(CollectivesMissing, match="2 ranks need the native library of kiln-execution"):
        await RankGroup.start(pair.manifest, pair.blobs, num_threads=1)
