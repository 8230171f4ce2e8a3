"""gRPC statuses become KilnError."""

import inspect

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from kiln_client import AsyncRuntime, FieldViolation, KilnError, errors
from kiln_client.status import error_from_status

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
    assert caught.value.metadata == {"address": "127.0.0.1:1"}


async def test_a_method_that_is_not_there() -> None:
    """A status without Kiln's details, from a server that is not Kiln's."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncRuntime(f"127.0.0.1:{port}") as runtime:
        with pytest.raises(errors.Unimplemented) as caught:
            await runtime.get_server_info()
    assert caught.value.reason == "UNIMPLEMENTED"
    await server.stop(None)
