"""What a runtime does with quarantined loads, and how operators lift a quarantine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as pb

from runtime_svc.deployments.records import LoadRecord, RecordStore
from runtime_svc.metrics import list_metrics
from tests.bundles.published import LayoutBundleService, publish
from tests.hang_guard import HANG_S
from tests.servers.runtime import Runtime, raises, serve_runtime

PROD, FOLLOWING = "story@prod", "--follow-interval=0.03"


def publish_as(bundles: LayoutBundleService, name: str) -> None:
    bundles.names[name] = publish(bundles.layout)


async def take_down(directory: Path, *ids: str) -> None:
    """Makes the deployments of the state directory ones that took a process down."""
    records = RecordStore(directory / "cache")
    for record in records.deployments.list():
        if record.spec.deployment_id in ids:
            await records.loads.save(LoadRecord(spec=record.spec, deaths=1, is_under_way=True))
    records.close()


async def follow_message(served: Runtime, wanted: str) -> None:
    """Waits until the follow message of `a` has a text or, with an empty one, until there is none."""
    async with asyncio.timeout(HANG_S):
        while wanted not in (said := (await served.get("a")).follow_message) or bool(said) != bool(wanted):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def read_metric(served: Runtime, name: str) -> float:
    (row,) = (row for row in list_metrics(served.server.deployments) if row.name == name)
    ((_, value),) = row.read()
    assert isinstance(value, float)
    return value


async def health_of(served: Any, name: str) -> str:
    response = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(service=name))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def test_a_quarantined_deployment_is_there_and_not_loaded(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        digest = (await first.deploy("a")).roles[0].bundle_digest
        await first.deploy("b")
    await take_down(tmp_path, "a")
    for is_last in (False, True):
        async with serve_runtime(tmp_path) as second:
            await second.wait_for_state("READY", "b")
            failed = await second.get("a")
            assert failed.state == pb.Deployment.STATE_FAILED
            assert "deployment 'a' is quarantined: the runtime died 2 times" in failed.message
            assert len(second.groups) == 1
            assert [await health_of(second, name) for name in ("", "deployment/a", "deployment/b")] == [
                "NOT_SERVING",
                "NOT_SERVING",
                "SERVING",
            ]
            async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
                await second.generate([5], deployment_id="a")
            if is_last:
                assert (await second.load(digest, "a"))[-1].deployment.state == pb.Deployment.STATE_READY
                assert await health_of(second, "") == "SERVING"
    async with serve_runtime(tmp_path) as third:
        await third.wait_for_state("READY", "a")


async def test_a_quarantined_deployment_can_be_unloaded(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy("a")
    await take_down(tmp_path, "a")
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("FAILED", "a")
        await second.unload("a")
    async with serve_runtime(tmp_path) as third:
        assert third.server.deployments.list() == []
        await third.deploy("a")


async def wait_until_forgotten(served: Runtime) -> None:
    """Waits until no load is recorded. Clients may see the end of a load before its record goes."""
    async with asyncio.timeout(HANG_S):
        while served.server.deployments._records.loads.list():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_shutdown_during_a_load_is_no_death(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy("a")
    for _ in range(3):
        async with serve_runtime(tmp_path) as again:
            again.load_gate.clear()
            async with asyncio.timeout(HANG_S):
                while not any(one.is_under_way for one in again.server.deployments._records.loads.list()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await again.get("a")).state == pb.Deployment.STATE_LOADING
    async with serve_runtime(tmp_path) as last:
        await last.wait_for_state("READY", "a")
        await wait_until_forgotten(last)


async def test_a_declared_deployment_is_tried_again_when_the_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deployments.yml"
    file.write_text("[{id: a, ref: story}]")

    def publish_story(bundles: LayoutBundleService) -> None:
        publish_as(bundles, "story")

    async with serve_runtime(tmp_path, f"--deployments={file}", prepare=publish_story) as first:
        await first.wait_for_state("READY", "a")
    await take_down(tmp_path, "a")
    async with serve_runtime(tmp_path, f"--deployments={file}", prepare=publish_story) as second:
        assert "quarantined" in (await second.wait_for_state("FAILED", "a")).message
        await second.server._reconciler.reload()
        await second.wait_for_state("READY", "a")


async def test_quarantined_weights_are_not_loaded_until_someone_asks_or_the_alias_moves(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FOLLOWING) as first:
        first.publish(PROD)
        deployment = (await first.load(PROD, "a", follow_alias=True))[-1].deployment
        story, poison = deployment.roles[0].bundle_digest, first.publish("poison", bias=31)
        mended = first.publish("mended", bias=9)
        (record,) = first.server.deployments._records.deployments.list()
    names = {PROD: poison}
    records = RecordStore(tmp_path / "cache")
    await records.loads.save(LoadRecord(spec=record.spec, deaths=1, is_under_way=True, weights_digest=poison))
    records.close()
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
        async with asyncio.timeout(HANG_S):
            while not loads.list():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert [(one.weights_digest, one.deaths, one.is_under_way) for one in loads.list()] == [(digest, 0, True)]
        served.ranks.gate.set()
        await stream
        async with asyncio.timeout(HANG_S):
            while (await served.get()).roles[0].weight_epoch != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await wait_until_forgotten(served)


async def test_a_declared_deployment_gets_quarantined_weights_when_the_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deployments.yml"
    file.write_text(f"[{{id: a, ref: {PROD}, follow_alias: true}}]")
    options = (f"--deployments={file}", FOLLOWING)
    async with serve_runtime(tmp_path, *options, prepare=lambda bundles: publish_as(bundles, PROD)) as first:
        await first.wait_for_state("READY", "a")
        poison = first.publish("poison", bias=31)
        (record,) = first.server.deployments._records.deployments.list()
    records = RecordStore(tmp_path / "cache")
    await records.loads.save(LoadRecord(spec=record.spec, deaths=1, is_under_way=True, weights_digest=poison))
    records.close()
    names = {PROD: poison}
    async with serve_runtime(tmp_path, *options, prepare=lambda bundles: bundles.names.update(names)) as second:
        await second.wait_for_state("READY", "a")
        await follow_message(second, "quarantined")
        await second.server._reconciler.reload()
        await follow_message(second, "")
        assert (await second.get("a")).roles[0].weights_digest == poison
