"""The runtime on ranks with NeuronCores, on a stand-in for libnrt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.manifest import Target
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.neuron.host import Faults, neuron_forkservers, neuron_host, neuron_pair, neuron_toy, nrt_library
from tests.neuron.toys import write_neff
from tests.ranks.toy import NUM_STATE, STATE_SHAPE, ToyBundle, make_model
from tests.ranks.toy_publishing import publish_toy
from tests.servers.runtime import Runtime, fields_of, raises, serve_runtime, tokens_of

__all__ = ["neuron_forkservers", "neuron_host", "neuron_pair", "neuron_toy", "nrt_library"]

PROMPT = [3, 9, 4]
STATE_BYTES = NUM_STATE * 4 * torch.Size(STATE_SHAPE).numel()


def greedy(seed: int, count: int) -> list[int]:
    """Tokens behind `PROMPT` by the toy itself, every position computed anew."""
    model, tokens = make_model(seed), list(PROMPT)
    for _ in range(count):
        state = [torch.zeros(STATE_SHAPE) for _ in range(NUM_STATE)]
        inputs = ([tokens], [list(range(len(tokens)))], [0], [len(tokens)])
        logits = model(*(torch.tensor(one, dtype=torch.int32) for one in inputs), *state)[0][0]
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture
def faults(neuron_host: Faults) -> Iterator[Faults]:
    yield neuron_host
    neuron_host.clear()


@asynccontextmanager
async def serving(tmp_path: Path, toy: ToyBundle, forkservers: RankForkservers) -> AsyncIterator[Runtime]:
    """A runtime on a host with two cores; the toy is published as `story`, with other weights as `other`."""
    start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open)
    arguments = ("--target=trn2", "--cores=2")
    async with serve_runtime(tmp_path / "runtime", *arguments, start_ranks=start_ranks) as served:
        for name, seed in (("story", 0), ("other", 1)):
            served.bundles.names[name] = publish_toy(served.store, toy, seed)
        yield served


async def generate(served: Runtime) -> list[int]:
    return tokens_of(await served.generate(PROMPT, 6, temperature=0.0))


@pytest.mark.parametrize("tp_degree", [1, 2])
async def test_load_generate_swap_reset(
    tmp_path: Path,
    neuron_toy: ToyBundle,
    neuron_pair: ToyBundle,
    neuron_forkservers: RankForkservers,
    tp_degree: int,
) -> None:
    toy = {1: neuron_toy, 2: neuron_pair}[tp_degree]
    async with serving(tmp_path, toy, neuron_forkservers) as served:
        assert (await served.info()).target == "trn2"
        await served.load("story")
        assert await generate(served) == greedy(0, 6)
        events = await served.load_weights("other")
        assert events[-1].result.weight_epoch == 2
        assert await generate(served) == greedy(1, 6)
        reset = await served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"))
        assert reset.zeroed_bytes == {1: STATE_BYTES, 2: 2 * STATE_BYTES * 3 // 4}[tp_degree]
        assert await generate(served) == greedy(1, 6)
        assert greedy(0, 6) != greedy(1, 6)
        await served.unload()
        await served.load("story")
        assert await generate(served) == greedy(0, 6)


async def test_broken_core_gets_no_ranks_until_the_runtime_restarts(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers, faults: Faults
) -> None:
    async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
        await served.load("story")
        faults.set("nrt_execute", 1202)
        async with raises("UNAVAILABLE", "DEVICE_BROKEN"):
            await generate(served)
        faults.clear()
        assert served.server.deployments.resources.cores.broken == (0,)
        await served.unload()
        assert (await served.info()).free_cores == 1
        async with raises("RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE"):
            await served.load("story", cores=[0])
        await served.load("story")
        assert await generate(served) == greedy(0, 6)


async def test_bundles_for_other_cores_are_refused_before_ranks_start(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
        target = Target(kind="trn1", isa="", architecture="sunda", lnc=1)
        other = msgspec.structs.replace(neuron_toy.manifest, target=target)
        toy = ToyBundle(other, neuron_toy.blobs, neuron_toy.weights, neuron_toy.shards)
        served.bundles.names["other-kind"] = publish_toy(served.store, toy, 0)
        async with raises("FAILED_PRECONDITION", "DEVICE_UNSUITABLE") as caught:
            await served.load("other-kind")
        assert fields_of(caught[0]) == ["target.kind"]

        executables = tuple(
            write_neff(one, tmp_path / f"{one.tag}.neff", lnc_size=1) for one in neuron_toy.manifest.executables
        )
        blobs = {one.blob: tmp_path / f"{one.tag}.neff" for one in executables}
        manifest = msgspec.structs.replace(neuron_toy.manifest, executables=executables)
        toy = ToyBundle(manifest, blobs, neuron_toy.weights, neuron_toy.shards)
        served.bundles.names["other-size"] = publish_toy(served.store, toy, 0)
        async with raises("FAILED_PRECONDITION", "NEFF_INVALID"):
            await served.load("other-size")
        assert (await served.info()).free_cores == 2


async def test_more_ranks_than_cores_are_refused(
    tmp_path: Path, neuron_pair: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with serving(tmp_path, neuron_pair, neuron_forkservers) as served:
        served.server.deployments.resources.cores.note_broken(1)
        async with raises("RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE"):
            await served.load("story")
