"""gRPC statuses become KilnError."""

import inspect
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from kiln_client import AsyncBundles, AsyncCompiler, AsyncRuntime, FieldViolation, KilnError, TlsOptions, errors
from kiln_client.status import error_from_status

from tests.servers.authority import Authority
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


async def test_a_method_that_is_not_there() -> None:
    """From a server that is not Kiln's."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncRuntime(f"127.0.0.1:{port}") as runtime:
        for call in (runtime.get_server_info(), runtime.complete("demo", "x")):
            with pytest.raises(errors.WrongService, match=rf"127\.0\.0\.1:{port} is no runtime of Kiln") as caught:
                await call
    assert (caught.value.code, caught.value.reason) == ("UNIMPLEMENTED", "WRONG_SERVICE")
    await server.stop(None)


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
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set(services[answering], health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with client(f"127.0.0.1:{port}") as swapped:
        with pytest.raises(errors.WrongService) as caught:
            await call(swapped)
    wanted = "runtime" if answering == "compiler" else "compiler"
    assert caught.value.message == (
        f"the {answering} answers at 127.0.0.1:{port}, and the call is for the {wanted}: "
        f"check --{wanted}, or KILN_{wanted.upper()}"
    )
    await server.stop(None)


async def test_causes_of_failed_connections_are_named(server: ScriptedServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate_path, key_path = authority.issue("server")
    pair = (key_path.read_bytes(), certificate_path.read_bytes())
    secured = ScriptedServer(grpc.ssl_server_credentials([pair]))
    misnamed = TlsOptions(authority.path, server_name="kiln.example")
    try:
        for address, tls, cause in (
            (server.address, TlsOptions(), "the server speaks plaintext, and TLS was asked for: leave out --tls"),
            (secured.address, None, "as one does that speaks TLS: if this one does, use --tls"),
            (secured.address, TlsOptions(), "no trusted authority has issued the server's certificate"),
            (secured.address, misnamed, "the server's certificate is for other hosts"),
            ("127.0.0.1:1", None, "nothing listens there"),
            ("nowhere.invalid:1", None, "the host has no address"),
        ):
            async with AsyncRuntime(address, tls=tls) as runtime:
                with pytest.raises(errors.Unavailable, match=f"connection to {address} failed: .*{cause}") as caught:
                    await runtime.get_server_info()
            assert caught.value.reason == "CONNECTION_FAILED"
            assert caught.value.metadata["detail"] not in caught.value.message
    finally:
        secured.stop()
