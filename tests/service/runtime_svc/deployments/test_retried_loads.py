"""Loads of declared and recorded deployments are repeated while what ended them may pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.errors import BlobCorrupt
from execution.device_errors import DeviceBroken, DeviceBusy
from execution.errors import ExecutableInvalid, RankDied, RankFailed
from tests.bundles.published import LayoutBundleService, publish
from tests.hang_guard import until
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, declare, serve_runtime

STORY = {"id": "d", "ref": "story"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.deployments.registry.FIRST_RETRY_S", 0.05)


def publish_story(bundles: LayoutBundleService) -> None:
    bundles.names |= {"story": publish(bundles.layout), "pair": publish(bundles.layout, tp_degree=2)}


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_busy_device_and_ranks_that_are_lost_in_a_load(tmp_path: Path, is_recorded: bool) -> None:
    argument = declare(tmp_path, STORY)
    if is_recorded:
        async with serve_runtime(tmp_path) as first:
            await first.deploy()
        argument = "--cores=4"
    async with serve_runtime(tmp_path, argument, prepare=publish_story) as served:
        served.start_failures.append(DeviceBusy("0", "NRT_FAILURE (1)", "another process has them"))
        served.load_failures += [RankDied(0, -9)] * 3
        waiting = await served.wait_for(lambda one: "rank 0 died: SIGKILL" in one.message)
        assert waiting.state == pb.Deployment.STATE_LOADING
        assert (await served.wait_for_state("READY")).message == ""
        assert len(served.groups) == 4
        assert served.server.deployments.quarantine._loads == {}


async def test_the_client_of_a_load_is_told_at_once(served: Runtime) -> None:
    served.load_failures.append(RankDied(0, -9))
    await refused(served.deploy(), "UNAVAILABLE", "RANK_DIED")
    assert (await served.get()).state == pb.Deployment.STATE_FAILED


@pytest.mark.parametrize(
    "error", [RankFailed(0, "a bug"), ExecutableInvalid("tkg", "no"), BlobCorrupt("sha256:" + "0" * 64, "others")]
)
async def test_what_comes_from_the_bundle_is_not_repeated(tmp_path: Path, error: Exception) -> None:
    async with serve_runtime(tmp_path, declare(tmp_path, STORY), prepare=publish_story) as served:
        served.load_failures.append(error)
        assert str(error) in (await served.wait_for_state("FAILED")).message


async def test_cores_that_others_hold_are_waited_for_and_none_held_meanwhile(tmp_path: Path) -> None:
    argument = declare(tmp_path, {"id": "d", "ref": "pair", "cores": [2, 3]}, {"id": "e", "ref": "pair"})
    async with serve_runtime(tmp_path, argument) as served:
        served.publish("story")
        await served.load("story", "mine", [3])
        publish_story(served.bundles)
        await served.wait_for_state("READY", "e")
        waiting = await served.wait_for(lambda one: "cores 2, 3 are wanted" in one.message)
        assert (waiting.state, list(waiting.cores)) == (pb.Deployment.STATE_LOADING, [])
        assert (await served.info()).free_cores == 1
        await served.unload("mine")
        assert list((await served.wait_for_state("READY")).cores) == [2, 3]


async def test_room_that_the_host_will_never_have_is_not_waited_for(tmp_path: Path) -> None:
    entries = [{"id": "d", "ref": "story", "cores": [7]}, {"id": "e", "ref": "pair"}]
    async with serve_runtime(tmp_path, declare(tmp_path, *entries), "--cores=1", prepare=publish_story) as served:
        for one in "de":
            assert "free cores: 0" in (await served.wait_for_state("FAILED", one)).message


async def test_a_load_whose_core_broke_takes_another(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, declare(tmp_path, STORY), "--cores=2", prepare=publish_story) as served:
        served.load_gate.clear()
        await until(lambda: served.groups)
        for _ in range(2):
            served.load_failures.append(DeviceBroken("nrt_load", "1204"))
        served.ranks.die(DeviceBroken("nrt_load", "1204"))
        served.load_gate.set()
        assert list((await served.wait_for_state("READY")).cores) == [1]
