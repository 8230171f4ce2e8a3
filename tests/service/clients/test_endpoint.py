"""Addresses, deadlines, retries and TLS."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from kiln.bundle.v1.bundle_pb2 import GetBundleResponse
from kiln.runtime.v1 import runtime_pb2
from kiln_client import (
    AsyncBundles,
    AsyncCompiler,
    AsyncRuntime,
    KilnError,
    Timeouts,
    TlsOptions,
    compile_request,
    errors,
)
from kiln_client.endpoint import DEFAULT_ADDRESSES, resolve_address

from tests.servers import responses as samples
from tests.servers.authority import Authority
from tests.servers.scripted_server import HANG, ScriptedServer, refusal

BUSY = refusal("UNAVAILABLE", "SHUTTING_DOWN", "going")


def test_address_is_argument_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KILN_RUNTIME", raising=False)
    assert resolve_address(None, "KILN_RUNTIME") == DEFAULT_ADDRESSES["KILN_RUNTIME"]
    monkeypatch.setenv("KILN_RUNTIME", "elsewhere:9")
    assert resolve_address(None, "KILN_RUNTIME") == "elsewhere:9"
    assert AsyncRuntime().address == "elsewhere:9"
    assert resolve_address("here:8", "KILN_RUNTIME") == "here:8"


@pytest.mark.parametrize("address", ["[::1]:80", "dns:///kiln.example:443", "unix:/run/kiln", "10.0.0.1:1"])
def test_other_targets_are_addresses(address: str) -> None:
    assert resolve_address(address, "KILN_RUNTIME") == address


@pytest.mark.parametrize("address", ["localhost", "localhost:", "host:port", "a b:1", ":1", "host:123456"])
def test_no_address(address: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        AsyncRuntime(address)
    assert caught.value.reason == "ADDRESS_INVALID"
    assert caught.value.fields[0].description == f"got {address!r}; accepted: HOST:PORT"


@pytest.mark.parametrize(
    ("address", "accepted"),
    [
        ("http://127.0.0.1:7002/", "HOST:PORT without http://, such as 127.0.0.1:7002"),
        ("https://kiln.example/", "HOST:PORT without https://, and --tls or --tls-ca"),
        ("grpcs://kiln.example:443", "HOST:PORT without grpcs://, such as kiln.example:443, and --tls or --tls-ca"),
    ],
)
def test_a_url_is_no_address(address: str, accepted: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        AsyncRuntime(address)
    assert caught.value.reason == "ADDRESS_INVALID"
    assert caught.value.fields[0].description.startswith(f"got {address!r}; accepted: {accepted}")


async def test_reads_are_tried_again(server: ScriptedServer) -> None:
    server.script("GetServerInfo", BUSY, BUSY, runtime_pb2.GetServerInfoResponse(version="1"))
    server.script("GetBundle", BUSY, GetBundleResponse(bundle=samples.bundle()))
    async with AsyncRuntime(server.address) as runtime, AsyncBundles(server.address) as bundles:
        assert (await runtime.get_server_info()).version == "1"
        assert (await bundles.get_bundle("tiny")).version == 3
    assert len(server.requests["GetServerInfo"]) == 3


async def test_reads_are_not_tried_for_ever(server: ScriptedServer) -> None:
    server.script("GetServerInfo", BUSY)
    async with AsyncRuntime(server.address) as runtime:
        with pytest.raises(errors.Unavailable, match="going"):
            await runtime.get_server_info()
    assert len(server.requests["GetServerInfo"]) == 4


async def test_changes_and_streams_are_not_tried_again(server: ScriptedServer) -> None:
    for method in ("Compile", "ResetKVCache", "Abort"):
        server.script(method, BUSY)
    server.script("Generate", [BUSY])
    request = compile_request("tiny", "model", {})
    async with AsyncRuntime(server.address) as runtime, AsyncCompiler(server.address) as compiler:
        for call in (
            compiler.start_compile(request),
            runtime.reset_kv_cache("demo"),
            runtime.abort("demo", "r1"),
            runtime.complete("demo", "x"),
        ):
            with pytest.raises(errors.Unavailable):
                await call
    assert [len(server.requests[method]) for method in ("Compile", "ResetKVCache", "Abort", "Generate")] == [1] * 4


async def test_every_call_has_a_deadline(server: ScriptedServer) -> None:
    server.script("GetServerInfo", HANG)
    server.script("ResetKVCache", HANG)
    server.script("Generate", [HANG])
    server.script("LoadBundle", [HANG])
    server.script("Compile", samples.OPERATION)
    server.script("WatchCompile", [HANG])
    timeouts = Timeouts(read_s=0.15, change_s=0.16, generate_s=0.17, load_s=0.18, compile_s=0.19)
    async with (
        AsyncRuntime(server.address, timeouts=timeouts) as runtime,
        AsyncCompiler(server.address, timeouts=timeouts) as compiler,
    ):
        for call in (
            runtime.get_server_info(),
            runtime.reset_kv_cache("demo"),
            runtime.complete("demo", "x"),
            runtime.load_bundle("tiny", "demo"),
            compiler.compile(compile_request("tiny", "model", {})),
        ):
            with pytest.raises(errors.DeadlineExceeded):
                await call
    methods = ("GetServerInfo", "ResetKVCache", "Generate", "LoadBundle", "WatchCompile")
    for method, limit_s in zip(methods, (0.15, 0.16, 0.17, 0.18, 0.19), strict=True):
        remaining = server.time_limits_s[method][0]
        assert remaining is not None
        assert limit_s - 0.1 < remaining <= limit_s + 0.01, method


async def test_timeout_of_one_call(server: ScriptedServer) -> None:
    server.script("Generate", [HANG])
    async with AsyncRuntime(server.address) as runtime:
        with pytest.raises(errors.DeadlineExceeded):
            await runtime.complete("demo", "x", timeout_s=0.2)


async def test_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate_path, key_path = authority.issue("server")
    client_certificate, client_key = authority.issue("client")
    credentials = grpc.ssl_server_credentials(
        [(key_path.read_bytes(), certificate_path.read_bytes())], authority.path.read_bytes(), require_client_auth=True
    )
    server = ScriptedServer(credentials)
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(version="1"))
    try:
        trusted = TlsOptions(authority.path, client_certificate, client_key)
        async with AsyncRuntime(server.address, tls=trusted) as runtime:
            assert (await runtime.get_server_info()).version == "1"
        for tls in (None, TlsOptions(), TlsOptions(authority.path)):  # plaintext, unknown authority, no certificate
            async with AsyncRuntime(server.address, tls=tls, timeouts=Timeouts(read_s=5)) as runtime:
                with pytest.raises(KilnError):
                    await runtime.get_server_info()
        misnamed = TlsOptions(authority.path, client_certificate, client_key, server_name="kiln.example")
        async with AsyncRuntime(server.address, tls=misnamed, timeouts=Timeouts(read_s=5)) as runtime:
            with pytest.raises(errors.Unavailable):
                await runtime.get_server_info()
    finally:
        server.stop()
