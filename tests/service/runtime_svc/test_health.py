"""Health is true: inference is SERVING when every deployment that should be there is READY."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from execution.errors import RankDied, RankFailed
from runtime_svc.server import CONTROL_SERVICE, SERVICES
from tests.hang_guard import HANG_S
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, declare, hold, serve_runtime, token_request

SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"
STORY = {"id": "d", "ref": "story"}
INFERENCE = [service for service in SERVICES if service != CONTROL_SERVICE]


async def check_all(served: Runtime) -> Mapping[str, str]:
    return {name: await served.check_health(name) for name in ("", "liveness", *SERVICES, "deployment/d")}


def expected(inference: str, deployment: str) -> dict[str, str]:
    return {
        "": inference,
        "liveness": SERVING,
        **dict.fromkeys(INFERENCE, inference),
        CONTROL_SERVICE: SERVING,
        "deployment/d": deployment,
    }


async def test_inference_waits_for_every_declared_deployment(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, declare(tmp_path, STORY, {"id": "d1", "ref": "other"})) as served:
        assert await check_all(served) == expected(NOT_SERVING, NOT_SERVING)
        states = served.watch_health("")
        assert await anext(states) == NOT_SERVING
        served.publish("story")
        await served.wait_for_state("READY")
        assert await check_all(served) == expected(NOT_SERVING, SERVING)
        assert await served.check_health("deployment/d1") == NOT_SERVING
        served.publish("other")
        assert await asyncio.wait_for(anext(states), HANG_S) == SERVING
        assert await check_all(served) == expected(SERVING, SERVING)


async def test_recovering_is_not_serving(served: Runtime) -> None:
    await served.deploy()
    states = served.watch_health(INFERENCE[0])
    assert await anext(states) == SERVING
    served.load_gate.clear()
    served.ranks.die()
    assert await asyncio.wait_for(anext(states), HANG_S) == NOT_SERVING
    assert await check_all(served) == expected(NOT_SERVING, NOT_SERVING)
    served.load_gate.set()
    assert await asyncio.wait_for(anext(states), HANG_S) == SERVING
    assert await check_all(served) == expected(SERVING, SERVING)


async def test_restored_deployments_count_from_the_start(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        await served.deploy()
        await served.server.drain()
    async with serve_runtime(tmp_path, prepare=lambda bundles: setattr(bundles, "is_away", True)) as served:
        served.load_gate.clear()
        assert await check_all(served) == expected(NOT_SERVING, NOT_SERVING)
        served.bundles.is_away = False
        served.load_gate.set()
        await served.wait_for_state("READY")
        assert await check_all(served) == expected(SERVING, SERVING)


async def test_a_load_by_a_call_takes_nothing_away_from_others(served: Runtime) -> None:
    await served.deploy("e")
    served.load_gate.clear()
    load = asyncio.create_task(served.deploy())
    await served.wait_for_health(NOT_SERVING, "deployment/d")
    assert await check_all(served) == expected(SERVING, NOT_SERVING)
    served.load_gate.set()
    await load
    assert await check_all(served) == expected(SERVING, SERVING)


async def test_a_failed_load_by_a_call_is_its_callers_affair_and_a_declared_one_is_not(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        served.start_failures = [RankDied(0, -9)]
        await refused(served.deploy(), "UNAVAILABLE", "RANK_DIED")
        assert await check_all(served) == expected(SERVING, NOT_SERVING)
    folder = tmp_path / "declared"
    folder.mkdir()
    async with serve_runtime(folder, declare(folder, STORY)) as served:
        served.start_failures = [RankFailed(0, "a bug")]
        served.publish("story")
        await served.wait_for_state("FAILED")
        assert await check_all(served) == expected(NOT_SERVING, NOT_SERVING)
        await served.unload()
        assert await check_all(served) == expected(SERVING, "NOT_FOUND")


async def test_awaiting_weights_is_not_serving_until_they_come(served: Runtime) -> None:
    await served.deploy(has_weights=False)
    assert await served.check_health("deployment/d") == NOT_SERVING
    served.publish("weights")
    await served.load_weights("weights")
    assert await served.check_health("deployment/d") == SERVING


async def test_an_unloaded_deployment_is_unknown(served: Runtime) -> None:
    await served.deploy()
    states = served.watch_health("deployment/d")
    assert await anext(states) == SERVING
    await served.unload()
    assert await check_all(served) == expected(SERVING, "NOT_FOUND")
    seen: list[str] = []
    while not seen or seen[-1] != "SERVICE_UNKNOWN":
        seen.append(await asyncio.wait_for(anext(states), HANG_S))
    assert set(seen) <= {NOT_SERVING, "SERVICE_UNKNOWN"}


async def test_draining_is_not_serving_and_tells_what_it_does(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, f"--drain-timeout={2 * HANG_S}") as served:
        await served.deploy()
        call: Any = await hold(served, token_request([5], 40))
        drain = asyncio.create_task(served.server.drain())
        await served.wait_for_health(NOT_SERVING)
        assert await check_all(served) == expected(NOT_SERVING, NOT_SERVING)
        # The control service says SERVING, so it must answer; but it begins nothing.
        assert (await served.get()).id == "d"
        for load in (served.load_weights("story"), served.load("story", "e")):
            await refused(load, "UNAVAILABLE", "SHUTTING_DOWN")
        await refused(served.generate([5]), "UNAVAILABLE", "SHUTTING_DOWN")
        served.ranks.gate.set()
        assert [event async for event in call]
        await drain


@pytest.mark.parametrize("name", ["deployment/none", "absent.Service"])
async def test_unknown_names_are_not_found(served: Runtime, name: str) -> None:
    assert await served.check_health(name) == "NOT_FOUND"
