"""What a runtime does with quarantined loads, and how operators lift a quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kiln.runtime.v1 import runtime_pb2 as pb

from runtime_svc.deployments.records import LoadRecord, RecordStore
from runtime_svc.metrics import list_metrics
from tests.bundles.published import LayoutBundleService, publish
from tests.hang_guard import until
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, declare, serve_runtime

PROD, FOLLOWING = "story@prod", "--follow-interval=0.03"


def publish_as(*names: str) -> Callable[[LayoutBundleService], None]:
    """Prepares a bundle service that has bundles of these names."""
    return lambda bundles: bundles.names.update({name: publish(bundles.layout) for name in names})


async def take_down(directory: Path, deployment_id: str, **fields: Any) -> None:
    """Makes the load of a deployment of the state directory, or of weights for it, one that took a process down."""
    records = RecordStore(directory / "cache")
    (spec,) = (one.spec for one in records.deployments.list() if one.spec.deployment_id == deployment_id)
    await records.loads.save(LoadRecord(spec=spec, deaths=1, is_under_way=True, **fields))
    records.close()


async def follow_message(served: Runtime, wanted: str) -> None:
    """Waits until the follow message of `a` has a text or, with an empty one, until there is none."""
    await served.wait_for(lambda one: wanted in one.follow_message and bool(one.follow_message) == bool(wanted), "a")


def read_metric(served: Runtime, name: str) -> float:
    (row,) = (row for row in list_metrics(served.server.deployments) if row.name == name)
    ((_, value),) = row.read()
    assert isinstance(value, float)
    return value


async def test_a_quarantined_deployment_can_be_unloaded(tmp_path: Path) -> None:
    """Until then it is there, and not loaded."""
    async with serve_runtime(tmp_path) as first:
        for name in "ab":
            await first.deploy(name)
    await take_down(tmp_path, "a")
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("READY", "b")
        failed = await second.wait_for_state("FAILED", "a")
        assert "deployment 'a' is quarantined: the runtime died 2 times" in failed.message
        assert len(second.groups) == 1
        health = [await second.check_health(name) for name in ("", "deployment/a", "deployment/b")]
        assert health == ["NOT_SERVING", "NOT_SERVING", "SERVING"]
        await refused(second.generate([5], deployment_id="a"), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
        await second.unload("a")
        assert await second.check_health() == "SERVING"
    async with serve_runtime(tmp_path) as third:
        assert [one.deployment_id for one in third.server.deployments.list()] == ["b"]
        await third.deploy("a")


async def wait_until_forgotten(served: Runtime) -> None:
    """Waits until no load is recorded. Clients may see the end of a load before its record goes."""
    await until(lambda: not served.server.deployments._records.loads.list())


async def test_a_shutdown_during_a_load_is_no_death(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy("a")
    for _ in range(3):
        async with serve_runtime(tmp_path) as again:
            again.load_gate.clear()
            await until(lambda: any(one.is_under_way for one in again.server.deployments._records.loads.list()))
            assert (await again.get("a")).state == pb.Deployment.STATE_LOADING
    async with serve_runtime(tmp_path) as last:
        await last.wait_for_state("READY", "a")
        await wait_until_forgotten(last)


async def test_a_declared_deployment_is_tried_again_when_the_file_is_read_again(tmp_path: Path) -> None:
    declared = declare(tmp_path, {"id": "a", "ref": "story"})
    async with serve_runtime(tmp_path, declared, prepare=publish_as("story")) as first:
        await first.wait_for_state("READY", "a")
    await take_down(tmp_path, "a")
    async with serve_runtime(tmp_path, declared, prepare=publish_as("story")) as second:
        assert "quarantined" in (await second.wait_for_state("FAILED", "a")).message
        await second.server._reconciler.reload()
        await second.wait_for_state("READY", "a")


async def test_quarantined_weights_are_not_loaded_until_someone_asks_or_the_alias_moves(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FOLLOWING) as first:
        first.publish(PROD)
        deployment = (await first.load(PROD, "a", follow_alias=True))[-1].deployment
        story, poison = deployment.roles[0].bundle_digest, first.publish("poison", bias=31)
        mended = first.publish("mended", bias=9)
    names = {PROD: poison}
    await take_down(tmp_path, "a", weights_digest=poison)
    serving = story
    for is_asked in (False, True):
        async with serve_runtime(tmp_path, FOLLOWING, prepare=lambda bundles: bundles.names.update(names)) as second:
            await second.wait_for_state("READY", "a")
            await follow_message(second, f"{poison} does not serve: they are quarantined: the runtime died 2 times")
            assert (await second.get("a")).roles[0].weights_digest == serving
            assert [read_metric(second, f"kiln:{what}_quarantined") for what in ("weights", "deployment")] == [1, 0]
            if is_asked:
                await second.load(PROD, "a", follow_alias=True)
            else:
                second.bundles.names[PROD] = mended
            await follow_message(second, "")
            serving = poison if is_asked else mended
            assert (await second.get("a")).roles[0].weights_digest == serving
            assert read_metric(second, "kiln:weights_quarantined") == 0


async def test_weights_of_an_alias_are_recorded_while_they_load(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FOLLOWING) as served:
        served.publish(PROD)
        await served.load(PROD, follow_alias=True)
        # Weights are swapped between requests, so this one holds their load up.
        served.ranks.gate.clear()
        stream = asyncio.create_task(served.generate([5]))
        await served.wait_for_slots(1)
        digest = served.publish(PROD, bias=31)
        loads = served.server.deployments._records.loads
        noted = await until(loads.list)
        assert [(one.weights_digest, one.deaths, one.is_under_way) for one in noted] == [(digest, 0, True)]
        served.ranks.gate.set()
        await stream
        await served.wait_for(lambda one: one.roles[0].weight_epoch == 2)
        await wait_until_forgotten(served)


async def test_a_declared_deployment_gets_quarantined_weights_when_the_file_is_read_again(tmp_path: Path) -> None:
    options = (declare(tmp_path, {"id": "a", "ref": PROD, "follow_alias": True}), FOLLOWING)
    async with serve_runtime(tmp_path, *options, prepare=publish_as(PROD)) as first:
        await first.wait_for_state("READY", "a")
        poison = first.publish("poison", bias=31)
    await take_down(tmp_path, "a", weights_digest=poison)
    names = {PROD: poison}
    async with serve_runtime(tmp_path, *options, prepare=lambda bundles: bundles.names.update(names)) as second:
        await second.wait_for_state("READY", "a")
        await follow_message(second, "quarantined")
        await second.server._reconciler.reload()
        await follow_message(second, "")
        assert (await second.get("a")).roles[0].weights_digest == poison
