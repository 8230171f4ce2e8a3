"""Every method of every client, asynchronous and blocking: what goes over the wire and what comes back."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln_client import (
    AsyncBundles,
    AsyncCompiler,
    AsyncRuntime,
    AsyncStream,
    Bundles,
    Compiler,
    Runtime,
    Stream,
    errors,
)

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer
from tests.service.clients.calls import (
    BUNDLE_CASES,
    COMPILER_CASES,
    LOADING,
    QUANTIZING,
    RUNTIME_CASES,
    WATCHING,
    Case,
    text_of,
)

CLIENTS = [
    *((AsyncCompiler, case) for case in COMPILER_CASES),
    *((AsyncBundles, case) for case in BUNDLE_CASES),
    *((AsyncRuntime, case) for case in RUNTIME_CASES),
]
#: Of each kind: an answer, a result behind progress, a stream. The others are made by the same two functions.
BLOCKING = [(Bundles, BUNDLE_CASES[0]), (Compiler, COMPILER_CASES[3]), (Runtime, RUNTIME_CASES[0])]


def script(server: ScriptedServer, case: Case) -> None:
    server.script("Compile", samples.OPERATION)
    server.script("QuantizeWeights", samples.OPERATION)
    server.script("WatchCompile", QUANTIZING if case.rpc == "QuantizeWeights" else WATCHING)
    server.script(case.rpc, case.answer)


@pytest.mark.parametrize(("client_class", "case"), CLIENTS, ids=str)
async def test_asynchronous_call(server: ScriptedServer, client_class: Any, case: Case) -> None:
    script(server, case)
    async with client_class(server.address, token="t0") as client:
        returned = case.call(client)
        result = [event async for event in returned] if isinstance(returned, AsyncStream) else await returned
    assert result == case.result
    assert [*map(text_of, server.requests[case.rpc])] == [case.request]
    sent = {metadata.get("authorization") for calls in server.metadata.values() for metadata in calls}
    assert sent == {"Bearer t0"}


@pytest.mark.parametrize(("client_class", "case"), BLOCKING, ids=str)
def test_blocking_call(server: ScriptedServer, client_class: Any, case: Case) -> None:
    script(server, case)
    with client_class(server.address) as client:
        returned = case.call(client)
        result = list(returned) if isinstance(returned, Stream) else returned
    assert result == case.result
    assert [*map(text_of, server.requests[case.rpc])] == [case.request]


@pytest.mark.parametrize(
    ("asynchronous", "blocking"), [(AsyncCompiler, Compiler), (AsyncBundles, Bundles), (AsyncRuntime, Runtime)]
)
def test_both_variants_have_the_same_methods(asynchronous: type, blocking: type) -> None:
    def methods(client: type) -> dict[str, str | None]:
        members = inspect.getmembers(client, inspect.isfunction)
        return {
            name: inspect.getdoc(method) for name, method in members if not name.startswith("_") and name != "close"
        }

    assert methods(asynchronous) == methods(blocking)
    assert len(set(methods(asynchronous).values())) == len(methods(asynchronous)), "one could stand for another"


async def test_what_is_left_out_is_unset(server: ScriptedServer) -> None:
    server.script("LeaseBundle", bundle_pb2.LeaseBundleResponse(lease=samples.LEASE))
    server.script("CollectGarbage", samples.COLLECTED)
    server.script("ImportBundle", samples.importing())
    server.script("LoadBundle", LOADING)
    async with AsyncBundles(server.address) as bundles, AsyncRuntime(server.address) as runtime:
        await bundles.lease_bundle("tiny", "me")
        await bundles.collect_garbage()
        await bundles.import_bundle("/import/store", "tiny")
        await runtime.load_bundle("tiny", "demo")
    assert not server.requests["LeaseBundle"][0].HasField("duration")
    assert not server.requests["CollectGarbage"][0].HasField("max_cache_age")
    assert not server.requests["ImportBundle"][0].HasField("alias_etag")
    assert not server.requests["LoadBundle"][0].HasField("threads_per_core")
    assert not server.requests["LoadBundle"][0].HasField("target_inter_token_latency")


async def test_import_that_ends_silently(server: ScriptedServer) -> None:
    server.script("ImportBundle", samples.importing()[:1])
    async with AsyncBundles(server.address) as bundles:
        with pytest.raises(errors.StreamIncomplete, match="no result"):
            await bundles.import_bundle("/import/store", "tiny")


async def test_every_page_is_read(server: ScriptedServer) -> None:
    server.script(
        "ListBundles",
        bundle_pb2.ListBundlesResponse(bundles=[samples.bundle(3), samples.bundle(2)], next_page_token="p2"),
        bundle_pb2.ListBundlesResponse(bundles=[samples.bundle(1)]),
    )
    server.script(
        "ListOperations",
        operations_pb2.ListOperationsResponse(operations=[{"name": "operations/1"}], next_page_token="p2"),
        operations_pb2.ListOperationsResponse(operations=[{"name": "operations/2"}]),
    )
    async with AsyncBundles(server.address) as bundles, AsyncCompiler(server.address) as compiler:
        assert [bundle.version for bundle in await bundles.list_bundles()] == [3, 2, 1]
        assert [operation.name for operation in await compiler.list_operations()] == ["operations/1", "operations/2"]
    for rpc in ("ListBundles", "ListOperations"):
        assert [request.page_token for request in server.requests[rpc]] == ["", "p2"]
