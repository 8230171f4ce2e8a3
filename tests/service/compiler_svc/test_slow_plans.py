"""Planning that never ends, takes all memory or dies holds up nothing but its own call."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from kiln.bundle.v1 import bundle_pb2

from bundle.errors import ResourcesShort
from bundle.store.layout import Layout
from compiler_svc.planning.pool import PlanningLimits, PlanningPool, make_forkserver
from execution.forkserver.client import Forkserver
from tests.bundles.samples import publish_sample
from tests.checkpoints.outside_families import install_families
from tests.hang_guard import HANG_S
from tests.processes import name_of, own_children
from tests.running_time import running_time
from tests.servers.compiler_process import run_compiler, wait_until_gone
from tests.servers.refusals import refusal, refused
from tests.servers.running_compiler import PLANS, Client, serve_compiler

#: A distribution's families, each of whose descriptions goes wrong in a way of its own.
FAMILIES = """
import os
import signal
import time
from dataclasses import replace

from compiler_svc.models.families.llama import FAMILY as LLAMA


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
    raise ZeroDivisionError("/secret/part by zero")


ENDLESS, HUNGRY, DEADLY, BROKEN = (
    replace(LLAMA, architectures=(describe.__name__,), describe=describe)
    for describe in (never_end, eat_memory, die, fail)
)
"""
NAMES = {"ENDLESS": "never_end", "HUNGRY": "eat_memory", "DEADLY": "die", "BROKEN": "fail"}

Serve = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution."""
    families = {name.lower(): f"odd_families:{name}" for name in NAMES}
    return install_families(tmp_path_factory.mktemp("families") / "site", {"odd_families": FAMILIES}, families)


@pytest.fixture(scope="module")
def plans(site: Path) -> Iterator[Forkserver]:
    """A forkserver of planning that has the families."""
    with pytest.MonkeyPatch.context() as patch, closing(make_forkserver()) as forkserver:
        patch.syspath_prepend(site)
        yield forkserver


@pytest.fixture
def home(home: Path) -> Path:
    """A model of each of the families beside `tiny`."""
    tiny = home / "models" / "tiny"
    config = json.loads((tiny / "config.json").read_text())
    for name in NAMES.values():
        model = home / "models" / name
        model.mkdir()
        (model / "model.safetensors").hardlink_to(tiny / "model.safetensors")
        (model / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    return home


@pytest.fixture
def serve(home: Path, plans: Forkserver) -> Serve:
    """Serves a compiler whose planning has the families, within limits."""

    @asynccontextmanager
    async def serve(**limits: Any) -> AsyncIterator[Client]:
        planning = PlanningPool(plans, PlanningLimits(**limits))
        async with serve_compiler(home, planning=planning) as (client, _):
            await planning.warm_up()
            yield client

    return serve


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
        slow = [client.plan(model="never_end", timeout=6) for _ in range(40)]
        await wait_for_processes(2)
        for _ in range(3):
            await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=digest), timeout=HANG_S)
        assert not any(call.done() for call in slow)
        for call in slow:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_for_processes(0)
        assert (await client.plan(model="tiny", timeout=HANG_S)).executables


async def test_a_cancelled_call_gives_its_place_up(serve: Serve) -> None:
    async with serve(max_running=1) as client:
        slow = client.plan(model="never_end")
        (process,) = await wait_for_processes(1)
        waiting = client.plan(model="tiny", timeout=HANG_S)
        slow.cancel()
        assert (await waiting).executables
        await wait_until_gone(process)


async def test_no_more_calls_wait_than_may(serve: Serve) -> None:
    async with serve(max_running=1, max_waiting=1) as client:
        first = client.plan(model="never_end")
        await wait_for_processes(1)
        second = client.plan(model="never_end")
        async with asyncio.timeout(HANG_S):
            while (how := await refusal(client.plan(model="never_end", timeout=1))).reason != "TOO_MANY_PLANS":
                pass
        assert (how.code, how.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 5)
        first.cancel()
        second.cancel()


async def test_a_limit_or_a_failure_is_named(serve: Serve) -> None:
    async with serve(timeout_s=10.0, max_memory_bytes=512 << 20) as client:
        for model, code, reason in (
            ("never_end", "DEADLINE_EXCEEDED", "PLAN_TIMED_OUT"),
            ("eat_memory", "RESOURCE_EXHAUSTED", "PLAN_MEMORY_EXCEEDED"),
            ("die", "INTERNAL", "PLAN_FAILED"),
            ("fail", "INTERNAL", "PLAN_FAILED"),
        ):
            assert "secret" not in (await refused(client.plan(model=model), code, reason)).message
            assert (await client.plan(model="tiny")).executables


def fill_disk(notes: Path) -> None:
    """Work that meets a full disk; notes how often it was done."""
    with notes.open("a") as file:
        file.write("once\n")
    raise ResourcesShort("disk", "no space left", 3.0)


async def test_a_shortage_that_the_work_meets_is_its_answer(tmp_path: Path) -> None:
    with pytest.raises(ResourcesShort, match="no space left"):
        await PlanningPool(PLANS).run(partial(fill_disk, tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "once\n"


async def test_sigterm_ends_a_compiler_that_plans(home: Path, site: Path) -> None:
    async with run_compiler(home, site=site) as compiler:
        calls = [compiler.client.plan(model="never_end") for _ in range(8)]
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
