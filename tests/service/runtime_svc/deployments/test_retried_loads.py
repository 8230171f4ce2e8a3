"""Loads of declared and recorded deployments are repeated while what ended them may pass."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.errors import BlobCorrupt
from execution.device_errors import DeviceBroken, DeviceBusy
from execution.errors import ExecutableInvalid, RankDied, RankFailed
from tests.bundles.published import LayoutBundleService, publish
from tests.hang_guard import HANG_S
from tests.servers.runtime import Runtime, raises, serve_runtime


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.deployments.registry.FIRST_RETRY_S", 0.05)


def declare(tmp_path: Path, *entries: dict[str, Any]) -> str:
    path = tmp_path / "deployments.json"
    path.write_text(json.dumps(entries))
    return f"--deployments={path}"


def publish_story(bundles: LayoutBundleService) -> None:
    bundles.names |= {"story": publish(bundles.layout), "pair": publish(bundles.layout, tp_degree=2)}


async def wait_for_message(served: Runtime, part: str, deployment_id: str = "d") -> pb.Deployment:
    async with asyncio.timeout(HANG_S):
        while part not in (deployment := await served.get(deployment_id)).message:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return deployment


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_rank_that_is_lost_in_a_load(tmp_path: Path, is_recorded: bool) -> None:
    argument = declare(tmp_path, {"id": "d", "ref": "story"})
    if is_recorded:
        async with serve_runtime(tmp_path) as first:
            await first.deploy()
        argument = "--cores=4"
    async with serve_runtime(tmp_path, argument, prepare=publish_story) as served:
        served.load_failures += [RankDied(0, -9)] * 3
        waiting = await wait_for_message(served, "rank 0 died: SIGKILL")
        assert waiting.state == pb.Deployment.STATE_LOADING
        assert (await served.wait_for_state("READY")).message == ""
        assert len(served.groups) == 4
        assert served.server.deployments.quarantine._loads == {}


async def test_the_client_of_a_load_is_told_at_once(served: Runtime) -> None:
    served.load_failures.append(RankDied(0, -9))
    async with raises("UNAVAILABLE", "RANK_DIED"):
        await served.deploy()
    assert (await served.get()).state == pb.Deployment.STATE_FAILED


@pytest.mark.parametrize(
    "error", [RankFailed(0, "a bug"), ExecutableInvalid("tkg", "no"), BlobCorrupt("sha256:" + "0" * 64, "others")]
)
async def test_what_comes_from_the_bundle_is_not_repeated(tmp_path: Path, error: Exception) -> None:
    argument = declare(tmp_path, {"id": "d", "ref": "story"})
    async with serve_runtime(tmp_path, argument, prepare=publish_story) as served:
        served.load_failures.append(error)
        assert str(error) in (await served.wait_for_state("FAILED")).message


async def test_a_busy_device_is_waited_for(tmp_path: Path) -> None:
    argument = declare(tmp_path, {"id": "d", "ref": "story"})
    async with serve_runtime(tmp_path, argument, prepare=publish_story) as served:
        served.start_failures.append(DeviceBusy("0", "NRT_RESOURCE"))
        await served.wait_for_state("READY")


async def test_cores_that_others_hold_are_waited_for_and_none_held_meanwhile(tmp_path: Path) -> None:
    argument = declare(tmp_path, {"id": "d", "ref": "pair", "cores": [2, 3]}, {"id": "e", "ref": "pair"})
    async with serve_runtime(tmp_path, argument) as served:
        served.publish("story")
        await served.load("story", "mine", [3])
        publish_story(served.bundles)
        await served.wait_for_state("READY", "e")
        waiting = await wait_for_message(served, "cores 2, 3 are wanted")
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
    argument = declare(tmp_path, {"id": "d", "ref": "story"})
    async with serve_runtime(tmp_path, argument, "--cores=2", prepare=publish_story) as served:
        served.load_gate.clear()
        async with asyncio.timeout(HANG_S):
            while not served.groups:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        for _ in range(2):
            served.load_failures.append(DeviceBroken("nrt_load", "1204"))
        served.ranks.die(DeviceBroken("nrt_load", "1204"))
        served.load_gate.set()
        assert list((await served.wait_for_state("READY")).cores) == [1]
