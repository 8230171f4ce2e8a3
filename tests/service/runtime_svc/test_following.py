"""Deployments whose weights follow an alias."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kiln.runtime.v1 import runtime_pb2 as pb
from structlog.testing import capture_logs

from runtime_svc.deployments.follower import AliasFollower
from tests.ranks.fakes import expected_tokens
from tests.servers.metrics import scrape
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of
from tests.shortages import few_descriptors

FAST = "--follow-interval=0.03"
PROD = "story@prod"


async def follow(served: Runtime, deployment_id: str = "d") -> pb.Deployment:
    """Deploys what story@prod names."""
    if PROD not in served.bundles.names:
        served.publish(PROD)
    return (await served.load(PROD, deployment_id, follow_alias=True))[-1].deployment


async def wait_for(served: Runtime, deployment_id: str = "d", **wanted: Any) -> pb.Deployment:
    """Waits for an epoch, and for a part of the follow message or, with an empty one, for none."""

    def is_so(deployment: pb.Deployment) -> bool:
        said, part = deployment.follow_message, wanted.get("message")
        epoch = deployment.roles[0].weight_epoch
        return epoch == wanted.get("epoch", epoch) and (part is None or (part in said if part else not said))

    return await served.wait_for(is_so, deployment_id)


async def test_weights_follow_the_alias(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FAST) as served:
        deployment = await follow(served)
        await follow(served, "e")
        assert (deployment.followed_alias, deployment.follow_message) == (PROD, "")
        story = deployment.roles[0].bundle_digest
        pirate = served.publish(PROD, bias=31)
        moved = await wait_for(served, epoch=2)
        role = moved.roles[0]
        assert (role.bundle_digest, role.weights_digest, role.weights_ref) == (story, pirate, PROD)
        assert moved.follow_message == ""
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31)
        await wait_for(served, "e", epoch=2)
        served.bundles.names[PROD] = story
        await wait_for(served, epoch=3)
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_running_requests_finish_on_the_old_weights(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FAST) as served:
        await follow(served)
        served.ranks.step_s = 0.005
        stream = asyncio.create_task(served.generate([5], 50))
        await served.wait_for_slots(1)
        served.publish(PROD, bias=31)
        events = await stream
        assert tokens_of(events) == expected_tokens([5], 50)
        assert {event.weight_epoch for event in events} == {1}
        await wait_for(served, epoch=2)


async def test_a_shortage_does_not_end_the_following(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FAST) as served:
        await follow(served)
        with few_descriptors():
            await wait_for(served, message="short of descriptors")
        served.publish(PROD, bias=31)
        assert (await wait_for(served, epoch=2, message="")).follow_message == ""


def publish_version(served: Runtime, number: int, **options: Any) -> str:
    """Publishes `story:vN` and moves the alias to it; returns its digest."""
    digest = served.publish(PROD, **options)
    served.bundles.versions[digest] = ("story", number)
    return digest


async def test_lists_name_what_serves_and_what_is_followed(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FAST) as served:
        story = publish_version(served, 1)
        await follow(served)
        pirate = publish_version(served, 2, bias=31)
        await wait_for(served, epoch=2)
        misfit = publish_version(served, 3, bias=32, graph_abi_digest="sha256:" + "1" * 64)
        deployment = await wait_for(served, message=f"story:v3 ({misfit}) does not serve: the bundle fits graph ABI")
        (listed,) = (await served.control.ListDeployments(pb.ListDeploymentsRequest())).deployments
        assert (listed.degraded, listed.followed_version, listed.followed_digest) == (True, "story:v3", misfit)
        role = listed.roles[0]
        assert (role.bundle_version, role.bundle_digest) == ("story:v1", story)
        assert (role.weights_ref, role.weights_version, role.weights_digest) == (PROD, "story:v2", pirate)
        assert deployment.state == pb.Deployment.STATE_READY
        (info,) = (await served.info()).deployments
        assert (info.weights_version, info.weights_digest, info.degraded) == ("story:v2", pirate, True)
    async with serve_runtime(tmp_path, prepare=lambda bundles: bundles.names.update({PROD: pirate})) as again:
        role = (await again.wait_for_state("READY")).roles[0]
        assert (role.bundle_version, role.weights_version) == ("story:v1", "story:v2"), "they were found by digest"


async def test_a_follower_that_fails_is_seen_and_told_of_once(tmp_path: Path) -> None:
    with capture_logs() as events:
        async with serve_runtime(tmp_path, FAST, "--metrics-address=127.0.0.1:0") as served:

            async def failing() -> float:
                return (await scrape(served.server.edge.metrics_port))["kiln:follow_failing{model_name=d}"]

            story = publish_version(served, 1)
            await follow(served)
            await served.deploy("still", ref="still")
            await served.wait_for_health("SERVING", "deployment/d/follow")
            assert await failing() == 0
            misfit = publish_version(served, 2, bias=31, graph_abi_digest="sha256:" + "1" * 64)
            await wait_for(served, message="graph ABI")
            await asyncio.sleep(0.2)
            names = ("", "deployment/d", "deployment/d/follow", "deployment/still/follow")
            states = [await served.check_health(name) for name in names]
            assert states == ["SERVING", "SERVING", "NOT_SERVING", "NOT_FOUND"]
            assert await failing() == 1
            # What the alias names is final; that the compiler does not answer passes.
            served.bundles.is_away = True
            await wait_for(served, message="does not answer")
            served.bundles.is_away = False
            await wait_for(served, message="graph ABI")
            assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
            mended = publish_version(served, 3, bias=9)
            await wait_for(served, epoch=2, message="")
            assert await served.check_health("deployment/d/follow") == "SERVING"
            assert await failing() == 0
    told = [one for one in events if one["event"] in {"alias not followed", "alias followed"}]
    assert [(one["event"], one.get("reason"), one["digest"]) for one in told if one["deployment_id"] == "d"] == [
        ("alias followed", None, story),
        ("alias not followed", "GRAPH_ABI_MISMATCH", misfit),
        ("alias not followed", "BUNDLE_SOURCE_UNAVAILABLE", ""),
        ("alias not followed", "GRAPH_ABI_MISMATCH", misfit),
        ("alias followed", None, mended),
    ]


async def test_each_reference_is_looked_up_once_per_interval(served: Runtime) -> None:
    served.publish(PROD)
    served.publish("other@prod")
    for deployment_id, ref in (("a", PROD), ("b", PROD), ("c", "other@prod")):
        await served.load(ref, deployment_id, follow_alias=True)
    await served.load(PROD, "still")
    served.bundles.lookups.clear()
    follower = AliasFollower(served.server.deployments, interval_s=60)
    await follower._poll()
    assert sorted(served.bundles.lookups) == ["other@prod", PROD]
    assert (await served.get("still")).followed_alias == ""


async def test_weights_by_hand_are_refused(served: Runtime) -> None:
    await follow(served)
    served.publish("pirate", bias=31)
    caught = await refused(served.load_weights("pirate"), "FAILED_PRECONDITION", "ALIAS_FOLLOWED")
    assert caught.metadata["alias"] == PROD


async def test_equal_load_answers_at_once_wherever_the_alias_points(served: Runtime) -> None:
    await follow(served)
    served.publish(PROD, bias=31)
    assert (await follow(served)).roles[0].weight_epoch == 1
    await refused(served.load(PROD), "ALREADY_EXISTS", "DEPLOYMENT_EXISTS")
    assert len(served.groups) == 1


async def test_following_outlives_a_restart(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        story = (await follow(first)).roles[0].bundle_digest
        pirate = first.publish("pirate", bias=31)
    names = {PROD: pirate}
    async with serve_runtime(tmp_path, FAST, prepare=lambda bundles: bundles.names.update(names)) as second:
        role = (await wait_for(second, epoch=2)).roles[0]
        assert (role.bundle_digest, role.weights_digest) == (story, pirate)


async def test_awaited_weights_come_by_the_alias(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FAST) as served:
        served.publish(PROD, has_weights=False)
        assert (await follow(served)).state == pb.Deployment.STATE_AWAITING_WEIGHTS
        await wait_for(served, message="no weights")
        served.publish(PROD, has_executables=False, bias=31)
        await wait_for(served, epoch=1)
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31)
