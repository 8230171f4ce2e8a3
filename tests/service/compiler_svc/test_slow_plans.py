"""Planning that never ends, takes all memory or dies holds up nothing but its own call."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.layout import Layout
from compiler_svc.planning.pool import PlanningLimits, PlanningPool, make_forkserver
from tests.bundles.samples import publish_sample
from tests.hang_guard import HANG_S
from tests.processes import name_of, own_children
from tests.running_time import running_time
from tests.servers.compiler_process import run_compiler, wait_until_gone
from tests.servers.running_compiler import Client, refusal, serve_compiler

#: A distribution's families, each of whose descriptions goes wrong in a way of its own.
FAMILIES = """
import os
import signal
import time
from dataclasses import replace

from compiler_svc.models.families.llama.config import FAMILY as LLAMA


def never_end(config):
    while True:
        time.sleep(60)


def eat_memory(config):
    eaten = []
    while True:
        eaten.append(bytearray(1 << 24))


def die(config):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(config):
    raise ZeroDivisionError("a secret of ours")


ENDLESS, HUNGRY, DEADLY, BROKEN = (
    replace(LLAMA, architectures=(describe.__name__,), describe=describe)
    for describe in (never_end, eat_memory, die, fail)
)
"""
NAMES = {"ENDLESS": "never_end", "HUNGRY": "eat_memory", "DEADLY": "die", "BROKEN": "fail"}

Serve = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def site(home: Path) -> Path:
    """The distribution, and a model of each of its families beside `tiny`."""
    site = home / "site"
    metadata = site / "odd_families-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "odd_families.py").write_text(FAMILIES)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-families\nVersion: 1.0\n")
    entries = "".join(f"{name.lower()} = odd_families:{name}\n" for name in NAMES)
    (metadata / "entry_points.txt").write_text(f"[kiln.model_families]\n{entries}")
    tiny = home / "models" / "tiny"
    config = json.loads((tiny / "config.json").read_text())
    for name in NAMES.values():
        model = home / "models" / name
        model.mkdir()
        (model / "model.safetensors").hardlink_to(tiny / "model.safetensors")
        (model / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    return site


@pytest.fixture
def serve(home: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serves a compiler whose planning has the families, within limits."""
    monkeypatch.syspath_prepend(site)

    @asynccontextmanager
    async def serve(**limits: Any) -> AsyncIterator[Client]:
        with closing(make_forkserver()) as forkserver:
            planning = PlanningPool(forkserver, PlanningLimits(**limits))
            async with serve_compiler(home, planning=planning) as (client, _):
                await planning.warm_up()
                yield client

    return serve


def plan(client: Client, model: str, **options: Any) -> Any:
    request = pb.PlanCompileRequest(model=model, config_json="{}", optimization_level=pb.OPTIMIZATION_LEVEL_O0)
    return client.compiler.PlanCompile(request, **options)


def planning_processes(pid: int | None = None) -> list[psutil.Process]:
    found = own_children() if pid is None else psutil.Process(pid).children(recursive=True)
    return [process for process in found if name_of(process) == "kiln-plan"]


async def wait_for_processes(count: int) -> list[psutil.Process]:
    async with asyncio.timeout(HANG_S):
        while len(found := planning_processes()) != count:  # noqa: ASYNC110 - processes announce no start
            await asyncio.sleep(0.01)
    return found


async def test_other_calls_do_not_wait(serve: Serve, home: Path) -> None:
    async with serve(max_running=2) as client:
        digest = publish_sample(Layout(home / "store"))
        request = pb.CompileRequest(
            name="x", model="never_end", config_json="{}", optimization_level=pb.OPTIMIZATION_LEVEL_O0
        )
        slow = [client.compiler.Compile(request, timeout=6) for _ in range(40)]
        await wait_for_processes(2)
        for _ in range(3):
            await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=digest), timeout=HANG_S)
        assert not any(call.done() for call in slow)
        for call in slow:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_for_processes(0)
        assert (await plan(client, "tiny", timeout=HANG_S)).executables


async def test_a_cancelled_call_gives_its_place_up(serve: Serve) -> None:
    async with serve(max_running=1) as client:
        slow = plan(client, "never_end")
        (process,) = await wait_for_processes(1)
        waiting = plan(client, "tiny", timeout=HANG_S)
        slow.cancel()
        assert (await waiting).executables
        await wait_until_gone(process)


async def test_no_more_calls_wait_than_may(serve: Serve) -> None:
    async with serve(max_running=1, max_waiting=1) as client:
        first = plan(client, "never_end")
        await wait_for_processes(1)
        second = plan(client, "never_end")
        async with asyncio.timeout(HANG_S):
            while (refused := await refusal(plan(client, "never_end", timeout=1))).reason != "TOO_MANY_PLANS":
                pass
        assert (refused.code, refused.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 5)
        first.cancel()
        second.cancel()


@pytest.mark.parametrize(
    ("model", "limits", "code", "reason"),
    [
        ("never_end", {"timeout_s": 5.0}, grpc.StatusCode.DEADLINE_EXCEEDED, "PLAN_TIMED_OUT"),
        ("eat_memory", {"max_memory_bytes": 512 << 20}, grpc.StatusCode.RESOURCE_EXHAUSTED, "PLAN_MEMORY_EXCEEDED"),
        ("die", {}, grpc.StatusCode.INTERNAL, "PLAN_FAILED"),
        ("fail", {}, grpc.StatusCode.INTERNAL, "PLAN_FAILED"),
    ],
)
async def test_a_limit_or_a_failure_is_named(
    serve: Serve, model: str, limits: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    async with serve(**limits) as client:
        refused = await refusal(plan(client, model))
        assert (refused.code, refused.reason) == (code, reason)
        assert "secret" not in refused.message
        assert (await plan(client, "tiny")).executables


async def test_sigterm_ends_a_compiler_that_plans(home: Path, site: Path) -> None:
    async with run_compiler(home, site=site) as compiler:
        calls = [plan(compiler.client, "never_end") for _ in range(8)]
        async with asyncio.timeout(HANG_S):
            while not (processes := planning_processes(compiler.process.pid)):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        with running_time() as taken:
            compiler.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(compiler.process.wait(), HANG_S) == 0
        assert taken.s < 8, "a second of draining, and what a busy machine adds"
        await wait_until_gone(*processes)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError):
                await call
