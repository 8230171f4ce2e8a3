"""The runtime on ranks with NeuronCores, on a stand-in for libnrt."""

from __future__ import annotations

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
from tests.hang_guard import until
from tests.neuron.host import Faults, neuron_forkservers, neuron_host, neuron_pair, neuron_toy, nrt_library
from tests.neuron.toys import write_neff
from tests.processes import descendants, is_rank
from tests.ranks.toy import NUM_STATE, STATE_SHAPE, ToyBundle, greedy, make_model
from tests.ranks.toy_publishing import publish_toy
from tests.servers.metrics import scrape
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of

__all__ = ["neuron_forkservers", "neuron_host", "neuron_pair", "neuron_toy", "nrt_library"]

WEIGHTS_BYTES = sum(tensor.nbytes for tensor in make_model(0).state_dict().values())
PROMPT = [3, 9, 4]
CORE_STATES = ("free", "in_use", "broken")
STATE_BYTES = NUM_STATE * 4 * torch.Size(STATE_SHAPE).numel()


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


async def test_two_ranks_load_generate_swap_and_reset_without_memory_of_the_host(
    tmp_path: Path, neuron_pair: ToyBundle, neuron_forkservers: RankForkservers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that exchange tensors through the host's memory are refused where the library for that is missing."""
    monkeypatch.setattr("execution.collectives.memory.load_collective_library", lambda: None)
    async with serving(tmp_path, neuron_pair, neuron_forkservers) as served:
        assert (await served.info()).target == "trn2"
        await served.load("story")
        assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]
        events = await served.load_weights("other")
        assert events[-1].result.weight_epoch == 2
        assert await generate(served) == greedy(PROMPT, 6, seed=1)[0]
        reset = await served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"))
        assert reset.zeroed_bytes == 2 * STATE_BYTES * 3 // 4
        assert await generate(served) == greedy(PROMPT, 6, seed=1)[0]
        assert greedy(PROMPT, 6, seed=0)[0] != greedy(PROMPT, 6, seed=1)[0]
        await served.unload()
        await served.load("story")
        assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]


async def test_broken_core_gets_no_ranks_until_the_runtime_restarts(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers, faults: Faults
) -> None:
    async with serving(tmp_path, neuron_toy, neuron_forkservers, "--metrics-address=127.0.0.1:0") as served:
        await served.load("story")
        assert await count_cores(served) == {"free": 1, "in_use": 1, "broken": 0}
        faults.set("nrt_execute", 101)
        await refused(generate(served), "UNAVAILABLE", "DEVICE_BROKEN")
        faults.clear()
        assert served.server.deployments.resources.cores.broken == (0,)
        assert await count_cores(served) == {"free": 1, "in_use": 0, "broken": 1}
        await served.unload()
        assert (await served.info()).free_cores == 1
        await refused(served.load("story", cores=[0]), "RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE")
        await served.load("story")
        assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]


async def test_bundles_that_do_not_fit_the_cores_are_refused_before_ranks_start(
    tmp_path: Path, neuron_toy: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    """The last two have NEFFs that are not as the manifest says: for cores of another size, and truncated."""
    async with serving(tmp_path, neuron_toy, neuron_forkservers) as served:
        for field, changes in (
            ("target.kind", {"kind": "trn1", "architecture": "sunda"}),
            ("target.lnc", {"kind": "trn2", "architecture": "cayman"}),
        ):
            publish_changed(served, "other", neuron_toy, target=Target(isa="", lnc=1, **changes))
            await refused(served.load("other"), "FAILED_PRECONDITION", "DEVICE_UNSUITABLE", field)
        for field, value in (("lnc_size", 1), ("data_size", 1 << 40)):
            executables = tuple(
                write_neff(one, tmp_path / f"{one.tag}.neff", **{field: value})
                for one in neuron_toy.manifest.executables
            )
            blobs = {one.blob: tmp_path / f"{one.tag}.neff" for one in executables}
            publish_changed(served, "changed", dataclasses.replace(neuron_toy, blobs=blobs), executables=executables)
            caught = await refused(served.load("changed"), "FAILED_PRECONDITION", "NEFF_INVALID")
            assert f"{field}: got " in caught.message
        assert (await served.info()).free_cores == 2


async def test_scattered_cores_are_refused_with_what_is_free(
    tmp_path: Path, neuron_pair: ToyBundle, neuron_forkservers: RankForkservers
) -> None:
    async with serving(tmp_path, neuron_pair, neuron_forkservers, "--cores=3") as served:
        await refused(served.load("story", cores=[0, 2]), "INVALID_ARGUMENT", "REQUEST_INVALID", "cores")
        served.server.deployments.resources.cores.note_broken(1)
        caught = await refused(served.load("story"), "RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE")
        assert "needs 2 cores that follow each other; free cores: 0, 2;" in caught.message


async def test_cores_of_a_container_keep_the_hosts_numbers(
    tmp_path: Path, neuron_pair: ToyBundle, neuron_host: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a host with more devices, the container has those of cores 24 to 31."""
    for name, value in (("FIRST_CORE", "24"), ("CORES", "8"), ("DIRECTORY", str(tmp_path / "host"))):
        monkeypatch.setenv(f"NEURON_STAND_IN_{name}", value)
    devices = tmp_path / "host/dev"
    devices.mkdir(parents=True)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "24-31")
    with RankForkservers() as forkservers:
        async with serving(tmp_path, neuron_pair, forkservers, "--cores=8") as served:
            assert list((await served.info()).host_cores) == [*range(24, 32)]
            await served.load("story", cores=[6, 7])
            assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]
            assert sorted(device.name for device in devices.iterdir()) == ["neuron30", "neuron31"]
            assert list((await served.get()).cores) == [6, 7]


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
        await until(lambda: list_ranks() - others - {rank})
        deployment = await served.wait_for_state("READY")
        assert list(deployment.cores) == [1]
        assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]


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
            caught = await refused(served.load_weights("other"), "RESOURCE_EXHAUSTED", "MEMORY_UNAVAILABLE")
            metadata = caught.metadata
            assert metadata["needed_bytes"] == str(WEIGHTS_BYTES)
            assert metadata["missing_bytes"] == str(missing_bytes)
            samples = await scrape(served.server.edge.metrics_port)
            assert samples["kiln:core_memory_bytes{core=0,model_name=d}"] == STATE_BYTES + WEIGHTS_BYTES
            assert (await served.get()).roles[0].weight_epoch == 1
            assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]

    async def test_by_what_the_library_says(
        self, tmp_path: Path, neuron_pair: ToyBundle, neuron_forkservers: RankForkservers, faults: Faults
    ) -> None:
        async with serving(tmp_path, neuron_pair, neuron_forkservers) as served:
            await served.load("story")
            faults.set("nrt_tensor_allocate", 4)
            await refused(served.load_weights("other"), "RESOURCE_EXHAUSTED", "DEVICE_MEMORY_SHORT")
            faults.clear()
            assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]
            await served.load_weights("other")
            assert await generate(served) == greedy(PROMPT, 6, seed=1)[0]


@pytest.mark.parametrize(("status", "error"), [(4, ("INTERNAL", "STEP_FAILED")), (5, ("UNAVAILABLE", "DEVICE_HUNG"))])
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
        await refused(generate(served), *error)
        faults.clear()
        deployment = await served.wait_for_state("READY")
        assert list(deployment.cores) == [0]
        assert await generate(served) == greedy(PROMPT, 6, seed=0)[0]
