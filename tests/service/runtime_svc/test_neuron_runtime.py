"""The runtime on ranks with NeuronCores, on a stand-in for libnrt."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.manifest import Target
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from targets.neuron import TRN2
from targets.registry import TARGETS
from tests.hang_guard import HANG_S
from tests.neuron.host import Faults, neuron_forkservers, neuron_host, neuron_pair, neuron_toy, nrt_library
from tests.neuron.toys import write_neff
from tests.processes import descendants, is_rank
from tests.ranks.toy import NUM_STATE, STATE_SHAPE, VOCAB, ToyBundle, make_model, save_shard
from tests.ranks.toy_publishing import publish_toy
from tests.servers.metrics import scrape
from tests.servers.runtime import Runtime, details_of, fields_of, raises, serve_runtime, tokens_of

__all__ = ["neuron_forkservers", "neuron_host", "neuron_pair", "neuron_toy", "nrt_library"]

WEIGHTS_BYTES = sum(tensor.nbytes for tensor in make_model(0).state_dict().values())
PROMPT = [3, 9, 4]
CORE_STATES = ("free", "in_use", "broken")
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
async def serving(
    tmp_path: Path, toy: ToyBundle, forkservers: RankForkservers, *options: str
) -> AsyncIterator[Runtime]:
    """A runtime on a host with two cores; the toy is published as `story`, with other weights as `other`."""
    start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open)
    arguments = ("--target=trn2", "--cores=2", *options)
    async with serve_runtime(tmp_path / "runtime", *arguments, start_ranks=start_ranks) as served:
        for name, seed in (("story", 0), ("other", 1)):
            served.bundles.names[name] = publish_toy(served.store, toy, seed)
        yield served


def publish_changed(served: Runtime, name: str, toy: ToyBundle, **changes: object) -> None:
    """Publishes the toy under a name, with other fields of its manifest."""
    manifest = msgspec.structs.replace(toy.manifest, **changes)
    served.bundles.names[name] = publish_toy(served.store, dataclasses.replace(toy, manifest=manifest), 0)


async def count_cores(served: Runtime) -> dict[str, float]:
    """What the metrics say of the cores, by state."""
    samples = await scrape(served.server.edge.metrics_port)
    return {state: samples[f"kiln:cores_by_state{{state={state},target=trn2}}"] for state in CORE_STATES}


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


@pytest.mark.parametrize("status", [101, 1202])
async def test_broken_core_gets_no_ranks_until_the_runtime_restarts(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers, faults: Faults, *, status: int
) -> None:
    async with serving(tmp_path, neuron_toy, neuron_forkservers, "--metrics-address=127.0.0.1:0") as served:
        await served.load("story")
        assert await count_cores(served) == {"free": 1, "in_use": 1, "broken": 0}
        faults.set("nrt_execute", status)
        async with raises("UNAVAILABLE", "DEVICE_BROKEN"):
            await generate(served)
        faults.clear()
        assert served.server.deployments.resources.cores.broken == (0,)
        assert await count_cores(served) == {"free": 1, "in_use": 0, "broken": 1}
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
        publish_changed(served, "other-kind", neuron_toy, target=target)
        async with raises("FAILED_PRECONDITION", "DEVICE_UNSUITABLE") as caught:
            await served.load("other-kind")
        assert fields_of(caught[0]) == ["target.kind"]

        target = Target(kind="trn2", isa="", architecture="cayman", lnc=1)
        publish_changed(served, "other-size", neuron_toy, target=target)
        async with raises("FAILED_PRECONDITION", "DEVICE_UNSUITABLE") as caught:
            await served.load("other-size")
        assert fields_of(caught[0]) == ["target.lnc"]
        assert (await served.info()).free_cores == 2


@pytest.mark.parametrize(("field", "value"), [("lnc_size", 1), ("data_size", 1 << 40)])
async def test_neffs_that_are_not_as_the_manifest_says_are_refused_before_ranks_start(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers, field: str, value: int
) -> None:
    """One is for logical cores of another size, the other is truncated: it has less data than its header says."""
    async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
        executables = tuple(
            write_neff(one, tmp_path / f"{one.tag}.neff", **{field: value}) for one in neuron_toy.manifest.executables
        )
        blobs = {one.blob: tmp_path / f"{one.tag}.neff" for one in executables}
        publish_changed(served, "changed", dataclasses.replace(neuron_toy, blobs=blobs), executables=executables)
        async with raises("FAILED_PRECONDITION", "NEFF_INVALID") as caught:
            await served.load("changed")
        assert f"{field}: got " in str(caught[0].details())
        assert (await served.info()).free_cores == 2


async def test_more_ranks_than_cores_are_refused(
    tmp_path: Path, neuron_pair: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with serving(tmp_path, neuron_pair, neuron_forkservers) as served:
        served.server.deployments.resources.cores.note_broken(1)
        async with raises("RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE"):
            await served.load("story")


async def test_scattered_cores_are_refused_with_what_is_free(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_pair: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with serving(tmp_path, neuron_toy, neuron_forkservers, "--cores=3") as served:
        served.bundles.names["pair"] = publish_toy(served.store, neuron_pair, 0)
        async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
            await served.load("pair", "p", cores=[0, 2])
        assert fields_of(caught[0]) == ["cores"]
        served.server.deployments.resources.cores.note_broken(1)
        async with raises("RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE") as caught:
            await served.load("pair", "p")
        assert "needs 2 cores that follow each other; free cores: 0, 2;" in str(caught[0].details())
        assert (await served.info()).free_cores == 2


async def test_host_without_the_library_fails_the_load_and_frees_its_cores(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_host: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with RankForkservers() as forkservers:
        async with serving(tmp_path, neuron_toy, forkservers) as served:
            async with raises("FAILED_PRECONDITION", "NEURON_LIBRARY_MISSING") as caught:
                await served.load("story")
            assert "install aws-neuronx-runtime-lib" in str(caught[0].details())
            assert (await served.info()).free_cores == 2


async def test_host_of_another_kind_than_the_operator_says(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_host: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_STAND_IN_FAMILY", "2")
    with RankForkservers() as forkservers:
        async with serving(tmp_path, neuron_toy, forkservers) as served:
            async with raises("FAILED_PRECONDITION", "DEVICE_UNSUITABLE") as caught:
                await served.load("story")
            assert "target.kind: got trn2; accepted: trn1" in str(caught[0].details())
            assert (await served.info()).free_cores == 2


def list_ranks() -> set[psutil.Process]:
    return set(filter(is_rank, descendants()))


async def test_killed_rank_gets_its_core_again(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
        # Other tests of this process have ranks that live on.
        others = list_ranks()
        await served.load("story", cores=[1])
        (rank,) = list_ranks() - others
        rank.kill()
        async with asyncio.timeout(HANG_S):
            while not list_ranks() - others - {rank}:  # noqa: ASYNC110 - processes announce no start
                await asyncio.sleep(0.01)
        deployment = await served.wait_for_state("READY")
        assert list(deployment.cores) == [1]
        assert await generate(served) == greedy(0, 6)


class TestWeightsThatDoNotFitBesideTheOldOnes:
    """The old ones serve on."""

    async def test_by_the_targets_figures(
        self,
        tmp_path: Path,
        neuron_toy: ToyBundle,
        neuron_forkservers: RankForkservers,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        needed_bytes = STATE_BYTES + 2 * WEIGHTS_BYTES
        # Of a logical core that has two physical ones: one byte less than needed, or two.
        target = dataclasses.replace(TRN2, core_bytes=(needed_bytes - 1) // 2)
        missing_bytes = needed_bytes - 2 * ((needed_bytes - 1) // 2)
        monkeypatch.setitem(TARGETS, "trn2", target)  # type: ignore[arg-type]
        async with serving(tmp_path, neuron_toy, neuron_forkservers, "--metrics-address=127.0.0.1:0") as served:
            await served.load("story")
            async with raises("RESOURCE_EXHAUSTED", "MEMORY_UNAVAILABLE") as caught:
                await served.load_weights("other")
            metadata = details_of(caught[0])[0].metadata
            assert metadata["needed_bytes"] == str(WEIGHTS_BYTES)
            assert metadata["missing_bytes"] == str(missing_bytes)
            samples = await scrape(served.server.edge.metrics_port)
            assert samples["kiln:core_memory_bytes{core=0,model_name=d}"] == STATE_BYTES + WEIGHTS_BYTES
            assert (await served.get()).roles[0].weight_epoch == 1
            assert await generate(served) == greedy(0, 6)

    async def test_by_what_the_library_says(
        self, tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers, faults: Faults
    ) -> None:
        async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
            await served.load("story")
            faults.set("nrt_tensor_allocate", 4)
            async with raises("RESOURCE_EXHAUSTED", "DEVICE_MEMORY_SHORT"):
                await served.load_weights("other")
            faults.clear()
            assert await generate(served) == greedy(0, 6)
            await served.load_weights("other")
            assert await generate(served) == greedy(1, 6)


STEP_FAILED = ("INTERNAL", "STEP_FAILED")
DEVICE_HUNG = ("UNAVAILABLE", "DEVICE_HUNG")


@pytest.mark.parametrize(
    ("status", "error"), [(4, STEP_FAILED), (1006, STEP_FAILED), (5, DEVICE_HUNG), (1200, DEVICE_HUNG)]
)
async def test_request_of_a_step_that_fails_or_hangs_is_the_last_that_fails(
    tmp_path: Path,
    neuron_toy: ToyBundle,
    neuron_forkservers: RankForkservers,
    faults: Faults,
    *,
    status: int,
    error: tuple[str, str],
) -> None:
    """The core stays in service. The runtime starts ranks anew, also after a step that did its rank no harm."""
    async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
        await served.load("story")
        faults.set("nrt_execute", status)
        async with raises(*error):
            await generate(served)
        faults.clear()
        deployment = await served.wait_for_state("READY")
        assert list(deployment.cores) == [0]
        assert await generate(served) == greedy(0, 6)


async def test_sequence_without_numbers_ends_and_others_of_its_steps_go_on(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library says so of a whole step (1003), whose outputs are there."""
    expected = greedy(0, 6)
    poison = min(set(range(3, VOCAB)) - {*PROMPT, *expected})
    model = make_model(0)
    model.embedding.weight[poison] = float("nan")
    poisoned = dataclasses.replace(neuron_toy, weights={0: save_shard(model, 0, 1, tmp_path / "poisoned.safetensors")})
    async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
        served.bundles.names["poisoned"] = publish_toy(served.store, poisoned, 0)
        await served.load("poisoned")
        deployment = served.server.deployments.get("d")
        assert deployment.engine is not None
        ranks = list_ranks()
        company = asyncio.gather(*(generate(served) for _ in range(4)))
        for _ in range(3):
            async with raises("FAILED_PRECONDITION", "NUMERICS_INVALID"):
                await served.generate([PROMPT[0], poison], 6, temperature=0.0)
        assert await company == [expected] * 4
        assert await generate(served) == expected, "its slot holds nothing of it"
        assert deployment.engine.scheduler.statistics.invalid_requests == 3
        assert list_ranks() == ranks, "no rank was started anew"
        assert list((await served.get()).cores) == [0]
    assert "had outputs without numbers" in capsys.readouterr().out
