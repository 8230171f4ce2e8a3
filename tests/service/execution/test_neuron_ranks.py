"""Rank processes with NeuronCores, on a stand-in for libnrt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from execution.device_errors import DeviceBroken, DeviceBusy, DeviceHung, DeviceMemoryShort
from execution.errors import RankDied, RankLost, StepFailed, WeightsNotStaged
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.contract.executors.executor_suite import CTE, TKG, Reference, prompt_inputs, token_inputs
from tests.neuron.host import Faults, neuron_forkservers, neuron_host, neuron_pair, neuron_toy, nrt_library
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_groups import step

__all__ = ["neuron_forkservers", "neuron_host", "neuron_pair", "neuron_toy", "nrt_library"]

PREFILL = step(CTE, prompt_inputs([5, 6, 7], 0))


@pytest.fixture
def faults(neuron_host: Faults) -> Iterator[Faults]:
    yield neuron_host
    neuron_host.clear()


@asynccontextmanager
async def started(bundle: ToyBundle, forkservers: RankForkservers, *cores: int) -> AsyncIterator[RankGroup]:
    group = await RankGroup.start(
        bundle.manifest, bundle.blobs, num_threads=1, open_forkserver=forkservers.open, cores=cores
    )
    try:
        yield group
    finally:
        await group.close()


async def test_ranks_serve_from_their_cores(neuron_toy: ToyBundle, neuron_forkservers: RankForkservers) -> None:
    reference = Reference(0)
    async with started(neuron_toy, neuron_forkservers, 1) as group:
        await group.load()
        await group.warm_up()
        await group.zero_state(None)
        for tag, inputs in ((CTE, prompt_inputs([5, 6, 7], 0)), (TKG, token_inputs([8, 9], [3, 0], [0, 1]))):
            result = await group.run(step(tag, inputs))
            assert result.tokens == reference.run(inputs).argmax(-1, keepdim=True).tolist()
        await group.stage_weights({0: neuron_toy.weights[1]})
        await group.swap_weights()
        swapped = Reference(1).run(prompt_inputs([5, 6, 7], 1)).argmax(-1, keepdim=True).tolist()
        assert (await group.run(step(CTE, prompt_inputs([5, 6, 7], 1)))).tokens == swapped


async def test_core_is_one_groups_until_it_ends(neuron_toy: ToyBundle, neuron_forkservers: RankForkservers) -> None:
    start = partial(started, neuron_toy, neuron_forkservers)
    async with start(0) as first, start(1) as second:
        await first.load()
        await second.load()
        async with start(0) as third:
            with pytest.raises(DeviceBusy, match="another process has cores 0"):
                await third.load()
        first.end(RankDied(0, -9))
        assert isinstance(await first.died, RankLost)
        async with start(0) as fourth:
            await fourth.load()


async def test_failed_step_leaves_the_group_alive(
    faults: Faults, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with started(neuron_toy, neuron_forkservers, 0) as group:
        await group.load()
        expected = (await group.run(PREFILL)).tokens
        faults.set("nrt_execute", 1006)
        with pytest.raises(StepFailed, match=r"NRT_EXEC_OOB \(1006\)"):
            await group.run(PREFILL)
        faults.clear()
        assert (await group.run(PREFILL)).tokens == expected


@pytest.mark.parametrize(
    ("status", "kind"), [(5, DeviceHung), (1200, DeviceHung), (101, DeviceBroken), (1202, DeviceBroken)]
)
async def test_core_that_cannot_go_on_ends_its_group(
    faults: Faults, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers, status: int, kind: type[RankLost]
) -> None:
    async with started(neuron_toy, neuron_forkservers, 0) as group:
        await group.load()
        faults.set("nrt_execute", status)
        with pytest.raises(kind, match=rf"nrt_execute ended with NRT_\w+ \({status}\)"):
            await group.run(PREFILL)
        verdict = await group.died
        assert (type(verdict), verdict.rank) == (kind, 0)
        with pytest.raises(kind):
            await group.run(PREFILL)
        faults.clear()
    async with started(neuron_toy, neuron_forkservers, 0) as group:
        await group.load()
        await group.run(PREFILL)


async def test_ranks_that_exchange_tensors(neuron_pair: ToyBundle, neuron_forkservers: RankForkservers) -> None:
    reference = Reference(0)
    async with started(neuron_pair, neuron_forkservers, 0, 1) as group:
        await group.load()
        await group.warm_up()
        await group.zero_state(None)
        for tag, inputs in ((CTE, prompt_inputs([5, 6, 7], 0)), (TKG, token_inputs([8, 9], [3, 0], [0, 1]))):
            result = await group.run(step(tag, inputs))
            assert result.tokens == reference.run(inputs).argmax(-1, keepdim=True).tolist()


async def test_ranks_that_meet_on_their_cores_take_no_memory_of_the_host_for_it(
    neuron_pair: ToyBundle, neuron_forkservers: RankForkservers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that exchange tensors through the host's memory are refused where the library for that is missing."""
    monkeypatch.setattr("execution.collectives.memory.load_collective_library", lambda: None)
    async with started(neuron_pair, neuron_forkservers, 0, 1) as group:
        await group.load()
        expected = Reference(0).run(prompt_inputs([5, 6, 7], 0)).argmax(-1, keepdim=True).tolist()
        assert (await group.run(PREFILL)).tokens == expected


async def test_memory_that_one_core_lacks_fails_the_staging_on_all(
    faults: Faults, neuron_pair: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with started(neuron_pair, neuron_forkservers, 0, 1) as group:
        await group.load()
        faults.set("nrt_tensor_allocate", 4)
        with pytest.raises(DeviceMemoryShort):
            await group.stage_weights(neuron_pair.shards[1])
        faults.clear()
        with pytest.raises(WeightsNotStaged):
            await group.swap_weights()
        expected = Reference(0).run(prompt_inputs([5, 6, 7], 0)).argmax(-1, keepdim=True).tolist()
        assert (await group.run(PREFILL)).tokens == expected


async def test_rank_that_waits_for_one_that_failed_ends_the_group(
    neuron_host: Faults, neuron_pair: ToyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is out of range and fails its step; the core of the other one times out in its collective."""
    monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", "3")
    shards = load_file(neuron_pair.shards[0][1]) | {"rank": torch.tensor([7], dtype=torch.int32)}
    save_file(shards, tmp_path / "wrong.safetensors")
    with RankForkservers() as forkservers:
        async with started(neuron_pair, forkservers, 0, 1) as group:
            await group.load()
            await group.stage_weights({0: neuron_pair.shards[0][0], 1: tmp_path / "wrong.safetensors"})
            await group.swap_weights()
            with pytest.raises(StepFailed, match=r"NRT_EXEC_OOB \(1006\)"):
                await group.run(PREFILL)
            verdict = await group.died
            assert (type(verdict), verdict.rank) == (DeviceHung, 0)
