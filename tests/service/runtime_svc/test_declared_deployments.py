"""A runtime that has what its deployments file says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from runtime_svc.deployments.errors import DeploymentsFileInvalid
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, declare, serve_runtime, tokens_of


async def reload(served: Runtime) -> None:
    await served.server._reconciler.reload()


async def ids_of(served: Runtime) -> list[str]:
    listed = (await served.control.ListDeployments(pb.ListDeploymentsRequest())).deployments
    return [deployment.id for deployment in listed]


async def test_file_is_followed_at_start_and_on_reload(tmp_path: Path) -> None:
    pair = {"id": "pair", "ref": "pair", "cores": [3, 2], "threads_per_core": 2}
    async with serve_runtime(tmp_path, declare(tmp_path, {"id": "story", "ref": "story"}, pair)) as served:
        served.publish("story")
        served.publish("pair", tp_degree=2)
        await served.load("story", "mine")
        deployment = await served.wait_for_state("READY", "pair")
        assert (list(deployment.cores), deployment.threads_per_core) == ([3, 2], 2)
        await served.wait_for_state("READY", "story")
        assert tokens_of(await served.generate([5], deployment_id="story")) == expected_tokens([5], 5)
        # One goes, one changes and takes the other's core, one comes; what a call has made stays.
        declare(tmp_path, {"id": "story", "ref": "story", "cores": [2]}, {"id": "new", "ref": "story", "cores": [3]})
        num_groups = len(served.groups)
        await reload(served)
        assert list((await served.wait_for_state("READY", "story")).cores) == [2]
        assert list((await served.wait_for_state("READY", "new")).cores) == [3]
        assert await ids_of(served) == ["mine", "new", "story"]
        assert len(served.groups) == num_groups + 2
        await reload(served)
        assert len(served.groups) == num_groups + 2, "nothing has changed"


async def test_restart_loads_each_once(tmp_path: Path) -> None:
    entries = [{"id": "a", "ref": "story"}, {"id": "b", "ref": "story"}]
    argument = declare(tmp_path, *entries)
    async with serve_runtime(tmp_path, argument) as first:
        digest = first.publish()
        for deployment_id in "ab":
            await first.wait_for_state("READY", deployment_id)
        await first.load("story", "mine")
    declare(tmp_path, entries[0], {"id": "c", "ref": "story"}, {"id": "mine", "ref": "story", "threads_per_core": 2})
    async with serve_runtime(tmp_path, argument) as second:
        assert await ids_of(second) == ["a", "c", "mine"]
        for deployment_id in ("a", "mine"):
            deployment = await second.wait_for_state("READY", deployment_id)
            assert (deployment.roles[0].bundle_digest, deployment.threads_per_core) == (digest, 1)
        assert (await second.get("c")).state == pb.Deployment.STATE_LOADING, "no bundle has its name yet"
        second.bundles.names["story"] = digest
        await second.wait_for_state("READY", "c")
        assert len(second.groups) == 3
    async with serve_runtime(tmp_path) as third:
        assert await ids_of(third) == ["a", "c", "mine"], "without a file, what was declared stays"


async def test_reload_tries_what_failed_again(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, declare(tmp_path, {"id": "pair", "ref": "pair", "cores": [0]})) as served:
        served.publish("pair", tp_degree=2)
        assert "cores" in (await served.wait_for_state("FAILED", "pair")).message
        declare(tmp_path, {"id": "pair", "ref": "pair"})
        await reload(served)
        await served.wait_for_state("READY", "pair")


async def test_mistakes_change_nothing_later_and_end_the_start(tmp_path: Path) -> None:
    argument = declare(tmp_path, {"id": "a", "ref": "story"})
    async with serve_runtime(tmp_path, argument) as served:
        served.publish()
        await served.wait_for_state("READY", "a")
        declare(tmp_path, {"id": "NO", "ref": "story"})
        await reload(served)
        assert await ids_of(served) == ["a"]
    with pytest.raises(DeploymentsFileInvalid, match="NO"):
        async with serve_runtime(tmp_path, argument):
            pass


async def test_unload_lets_requests_finish_for_a_while(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, declare(tmp_path, {"id": "d", "ref": "story"}), "--drain-timeout=5") as served:
        served.publish()
        await served.wait_for_state("READY")
        served.ranks.step_s = 0.005
        stream = asyncio.create_task(served.generate([5], 40))
        await served.wait_for_slots(1)
        declare(tmp_path)
        await reload(served)
        assert tokens_of(await stream) == expected_tokens([5], 40)
        assert await ids_of(served) == []
