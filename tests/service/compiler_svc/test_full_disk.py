"""A full disk is named by every call that writes, and passes when there is room again."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2
from sqlalchemy import event
from sqlalchemy.engine import Engine

from bundle.store.layout import Layout
from compiler_svc.errors import BuildFailed
from tests.bundles.samples import publish_sample
from tests.servers.refusals import Refusal, expect, read_refusal, refusal
from tests.servers.running_compiler import Client, DirectedRunner, serve_compiler
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
            return read_refusal(rpc_status.from_call(error) or status_pb2.Status())
    raise AssertionError("the database has room")


def holder(number: int) -> str:
    return f"{number:0128}"


def lease_of(client: Client, digest: str) -> Callable[[int], Awaitable[object]]:
    return lambda number: client.bundles.LeaseBundle(bundle_pb2.LeaseBundleRequest(ref=digest, holder=holder(number)))


@pytest.mark.usefixtures("small_database")
async def test_calls_that_write_to_the_database(home: Path) -> None:
    async with serve_compiler(home, "--max-waiting", "100000") as (client, runner):
        runner.is_open.set()
        lease = lease_of(client, (await client.build(name="a")).digest)
        runner.is_open.clear()
        for call in (
            lease,
            lambda number: client.compile(request_id=f"{number:0128}", salt=f"{number:0256}"),
            lambda number: client.bundles.SetAlias(bundle_pb2.SetAliasRequest(ref="a:v1", alias=f"x{number:0100}")),
        ):
            how = expect(await fill(call), "RESOURCE_EXHAUSTED", "RESOURCES_SHORT")
            assert (how.metadata["resource"], how.retry_after_s) == ("disk space", 30)
        await client.bundles.ReleaseLease(bundle_pb2.ReleaseLeaseRequest(holder=holder(0)))
        await lease(0)


async def test_a_build(client: Client, runner: DirectedRunner) -> None:
    runner.is_open.set()
    runner.error = OSError(errno.ENOSPC, "No space left on device", "/a/path/of/the/host")
    how = await client.fail(await client.compile(), "RESOURCE_EXHAUSTED", "RESOURCES_SHORT")
    assert how.message == "the host is short of disk space: No space left on device"


@pytest.mark.usefixtures("small_database")
async def test_an_operation_whose_end_finds_no_room_ends_when_there_is_some(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bundle.host.shortage.BRIEF_DELAYS_S", (0.01,))
    async with serve_compiler(home, "--max-waiting", "100000") as (client, runner):
        operation = await client.compile(name="a")
        await client.reach_build(operation)
        await fill(lease_of(client, publish_sample(Layout(home / "store"))))
        runner.error = BuildFailed("x" * 9000)
        runner.is_open.set()
        await asyncio.sleep(0.5)
        assert not (await client.get(operation.name)).done
        for number in range(100):
            await client.bundles.ReleaseLease(bundle_pb2.ReleaseLeaseRequest(holder=holder(number)))
        await client.fail(operation, "INTERNAL", "BUILD_FAILED")


async def test_a_plan_without_descriptors(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bundle.host.shortage.BRIEF_DELAYS_S", (0.01,))
    await client.plan()
    with few_descriptors():
        how = await refusal(client.plan())
    expect(how, "RESOURCE_EXHAUSTED", "RESOURCES_SHORT")
    await client.plan()
