"""A full disk is named by every call that writes, and passes when there is room again."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from sqlalchemy import event
from sqlalchemy.engine import Engine

from bundle.layout import Layout
from compiler_svc.errors import BuildFailed
from tests.bundles.samples import publish_sample
from tests.servers.running_compiler import Client, DirectedRunner, Refusal, read_refusal, refusal, serve_compiler
from tests.shortages import few_descriptors

#: Pages of 4 KiB: the tables of a new database and little more.
MAX_PAGES = 40


@pytest.fixture
def small_database() -> Iterator[None]:
    """Databases have no room beyond `MAX_PAGES`, as on a full disk."""

    def limit(connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count={MAX_PAGES}")

    event.listen(Engine, "connect", limit)
    yield
    event.remove(Engine, "connect", limit)


async def fill(call: Callable[[int], Awaitable[object]]) -> Refusal:
    """Repeats a call until the database has no room for it; returns how it is refused."""
    for number in range(2000):
        try:
            await call(number)
        except grpc.aio.AioRpcError as error:
            status = rpc_status.from_call(error)
            assert status is not None
            return read_refusal(status)
    raise AssertionError("the database has room")


@pytest.mark.usefixtures("small_database")
async def test_calls_that_write_to_the_database(home: Path) -> None:
    async with serve_compiler(home, "--max-waiting", "100000") as (client, _):
        digest = publish_sample(Layout(home / "store"))

        def lease(number: int) -> Awaitable[object]:
            request = bundle_pb2.LeaseBundleRequest(ref=digest, holder=f"{number:0128}")
            result: Awaitable[object] = client.bundles.LeaseBundle(request)
            return result

        for call in (lease, lambda number: client.compile(request_id=f"{number:0128}", salt=f"{number:0256}")):
            refused = await fill(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCES_SHORT")
            assert refused.metadata["resource"] == "disk space"
            assert refused.retry_after_s == 30
            assert str(home) not in refused.message
        await client.bundles.ReleaseLease(bundle_pb2.ReleaseLeaseRequest(holder=f"{0:0128}"))
        await lease(0)


@pytest.mark.usefixtures("small_database")
async def test_aliases(home: Path) -> None:
    runner = DirectedRunner(home / "store")
    runner.is_open.set()
    async with serve_compiler(home, runner=runner) as (client, _):
        await client.finish(await client.compile(name="a"))

        def name(number: int) -> Awaitable[object]:
            request = bundle_pb2.SetAliasRequest(ref="a:v1", alias=f"x{number:0100}")
            result: Awaitable[object] = client.bundles.SetAlias(request)
            return result

        assert (await fill(name)).reason == "RESOURCES_SHORT"


async def test_a_build(client: Client, runner: DirectedRunner) -> None:
    runner.is_open.set()
    runner.error = OSError(errno.ENOSPC, "No space left on device", "/a/path/of/the/host")
    refused = read_refusal((await client.finish(await client.compile())).error)
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCES_SHORT")
    assert refused.message == "the host is short of disk space: No space left on device"


@pytest.mark.usefixtures("small_database")
async def test_an_operation_whose_end_finds_no_room_ends_when_there_is_some(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bundle.shortage.BRIEF_DELAYS_S", (0.01,))
    runner = DirectedRunner(home / "store")
    async with serve_compiler(home, "--max-waiting", "100000", runner=runner) as (client, _):
        digest = publish_sample(Layout(home / "store"))
        operation = await client.compile(name="a")
        await client.reach_build(operation)
        holders = [f"{number:0128}" for number in range(2000)]

        def lease(number: int) -> Awaitable[object]:
            request = bundle_pb2.LeaseBundleRequest(ref=digest, holder=holders[number])
            result: Awaitable[object] = client.bundles.LeaseBundle(request)
            return result

        await fill(lease)
        runner.error = BuildFailed("x" * 9000)
        runner.is_open.set()
        await asyncio.sleep(0.5)
        assert not (await client.get(operation.name)).done
        for holder in holders[:100]:
            await client.bundles.ReleaseLease(bundle_pb2.ReleaseLeaseRequest(holder=holder))
        assert read_refusal((await client.finish(operation)).error).reason == "BUILD_FAILED"


async def test_a_plan_without_descriptors(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bundle.shortage.BRIEF_DELAYS_S", (0.01,))
    async with serve_compiler(home) as (client, _):
        request = pb.PlanCompileRequest(model="tiny", config_json="{}")
        await client.compiler.PlanCompile(request)
        with few_descriptors():
            refused = await refusal(client.compiler.PlanCompile(request))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCES_SHORT")
        await client.compiler.PlanCompile(request)
