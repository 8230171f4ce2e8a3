"""gRPC statuses become KilnError."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from kiln_client import AsyncBundles, AsyncCompiler, AsyncRuntime, FieldViolation, KilnError, TlsOptions, errors
from kiln_client.errors import error_from_status

from tests.servers.scripted_server import ScriptedServer, refusal


async def test_details_become_attributes(server: ScriptedServer) -> None:
    answer = refusal(
        "INVALID_ARGUMENT",
        "REQUEST_INVALID",
        "two mistakes",
        fields=[
            ("sampling.temperature", "got -1; accepted: at least 0"),
            ("stop.max_new_tokens", "got 0; accepted: 1…"),
        ],
        retry_after_s=1.5,
        deployment_id="demo",
    )
    server.script("GetServerInfo", answer)
    async with AsyncRuntime(server.address) as runtime:
        with pytest.raises(errors.InvalidArgument) as caught:
            await runtime.get_server_info()
    error = caught.value
    assert (error.code, error.reason, error.message) == ("INVALID_ARGUMENT", "REQUEST_INVALID", "two mistakes")
    assert error.metadata == {"deployment_id": "demo"}
    assert error.retry_after_s == 1.5
    assert error.fields == (
        FieldViolation("sampling.temperature", "got -1; accepted: at least 0", "REQUEST_INVALID"),
        FieldViolation("stop.max_new_tokens", "got 0; accepted: 1…", "REQUEST_INVALID"),
    )
    assert "sampling.temperature: got -1" in str(error)


@pytest.mark.parametrize("code", [value.name for value in code_pb2.Code.DESCRIPTOR.values if value.number])
def test_every_code_keeps_its_name(code: str) -> None:
    error = error_from_status(status_pb2.Status(code=code_pb2.Code.Value(code), message="why"))
    assert (error.code, error.reason, error.message, error.fields) == (code, code, "why", ())
    assert error.retry_after_s is None


def test_every_code_of_the_tree_has_its_class() -> None:
    """A class whose code never leads to it would be an error that no caller can catch."""
    unmapped = {
        error_class
        for _, error_class in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error_class, KilnError)
        and "default_code" in vars(error_class)
        and error_class is not KilnError
        and type(error_from_status(status_pb2.Status(code=code_pb2.Code.Value(error_class.default_code))))
        is not error_class
    }
    assert unmapped == set()


def test_a_code_from_the_future_is_unknown() -> None:
    assert error_from_status(status_pb2.Status(code=99)).code == "UNKNOWN"


async def test_a_server_that_is_not_there() -> None:
    async with AsyncRuntime("127.0.0.1:1") as runtime:
        with pytest.raises(errors.Unavailable, match=r"connection to 127\.0\.0\.1:1 failed") as caught:
            await runtime.get_server_info()
    assert caught.value.reason == "CONNECTION_FAILED"
    assert caught.value.metadata["address"] == "127.0.0.1:1"


@asynccontextmanager
async def serve(*names: str) -> AsyncIterator[str]:
    """A server that has nothing but the health of these services; its address."""
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    for name in names:
        await servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_method_that_is_not_there() -> None:
    """From a server that is not Kiln's."""
    async with serve() as address, AsyncRuntime(address) as runtime:
        for call in (runtime.get_server_info(), runtime.complete("demo", "x")):
            with pytest.raises(errors.Unimplemented, match=f"{address} is no runtime of Kiln") as caught:
                await call
    assert (caught.value.code, caught.value.reason) == ("UNIMPLEMENTED", "WRONG_SERVICE")


@pytest.mark.parametrize(
    ("client", "answering", "call"),
    [
        (AsyncRuntime, "compiler", lambda client: client.get_server_info()),
        (AsyncRuntime, "compiler", lambda client: client.complete("demo", "x")),
        (AsyncCompiler, "runtime", lambda client: client.list_operations()),
        (AsyncBundles, "runtime", lambda client: client.get_bundle("tiny")),
    ],
)
async def test_swapped_addresses_are_named(client: Any, answering: str, call: Any) -> None:
    services = {"compiler": "kiln.compiler.v1.CompilerService", "runtime": "kiln.runtime.v1.RuntimeService"}
    async with serve(services[answering]) as address, client(address) as swapped:
        with pytest.raises(errors.Unimplemented) as caught:
            await call(swapped)
    wanted = "runtime" if answering == "compiler" else "compiler"
    assert caught.value.message == (
        f"the {answering} answers at {address}, and the call is for the {wanted}: "
        f"check --{wanted}, or KILN_{wanted.upper()}"
    )


async def test_causes_of_failed_connections_are_named(
    server: ScriptedServer, secured: tuple[ScriptedServer, TlsOptions]
) -> None:
    other, tls = secured
    misnamed = replace(tls, server_name="kiln.example")
    for address, options, cause in (
        (server.address, TlsOptions(), "the server speaks plaintext, and TLS was asked for: leave out --tls"),
        (other.address, None, "as one does that speaks TLS: if this one does, use --tls"),
        (other.address, TlsOptions(), "no trusted authority has issued the server's certificate"),
        (other.address, misnamed, "the server's certificate is for other hosts"),
        ("127.0.0.1:1", None, "nothing listens there"),
        ("nowhere.invalid:1", None, "the host has no address"),
    ):
        async with AsyncRuntime(address, tls=options) as runtime:
            with pytest.raises(errors.Unavailable, match=f"connection to {address} failed: .*{cause}") as caught:
                await runtime.get_server_info()
        assert caught.value.reason == "CONNECTION_FAILED"
        assert caught.value.metadata["detail"] not in caught.value.message
