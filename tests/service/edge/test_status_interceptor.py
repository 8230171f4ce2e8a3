import asyncio
import errno

import grpc
import pytest
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2
from structlog.testing import capture_logs

from bundle.errors import BlobNotFound, FieldViolation, KilnError
from tests.hang_guard import HANG_S
from tests.servers.probe import CHUNK, GET, READ, SERVICE, Flood, Probe, call_method, fail_with, hang, serve, stub
from tests.servers.refusals import Refusal, refusal, refused

REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Overloaded(KilnError, code="UNAVAILABLE"):
    """One that the probe raises."""


class Untold(KilnError):
    """One that clients are not told."""


async def test_error_arrives_with_all_its_details() -> None:
    violations = (FieldViolation("temperature", "-1", "0 or more"), FieldViolation("top_p", "2", "from 0 to 1"))
    error = Overloaded("try later", violations=violations, retry_after_s=0.5, queue="gênération", limit=8)
    async with serve(Probe(fail_with(error))) as channel:
        how = await refusal(stub(channel).GetBundle(GET, metadata=(("x-request-id", "abc-1"),)))
    assert how == Refusal(
        code=grpc.StatusCode.UNAVAILABLE,
        reason="OVERLOADED",
        metadata={"queue": "gênération", "limit": "8"},
        fields={"temperature": "got -1; accepted: 0 or more", "top_p": "got 2; accepted: from 0 to 1"},
        retry_after_s=0.5,
        message="try later",
        request_id="abc-1",
    )


async def test_stream_sends_what_it_has_and_then_the_error() -> None:
    probe = Probe(fail_with(BlobNotFound("sha256:" + "0" * 64)))
    async with serve(probe) as channel:
        how = await refused(stub(channel).ReadBlob(READ), "NOT_FOUND", "BLOB_NOT_FOUND")
    assert how.events == [CHUNK]
    assert probe.left.is_set()


@pytest.mark.parametrize("method", ["GetBundle", "ReadBlob"])
async def test_a_shortage_of_the_host_is_named(method: str) -> None:
    probe = Probe(fail_with(OSError(errno.EMFILE, "Too many open files", "/secret")))
    async with serve(probe) as channel:
        how = await refused(call_method(channel, method), "RESOURCE_EXHAUSTED", "RESOURCES_SHORT")
    assert how.message == "the host is short of descriptors of this process: Too many open files"
    assert how.retry_after_s == 30


@pytest.mark.parametrize("method", ["GetBundle", "ReadBlob"])
@pytest.mark.parametrize("error", [ValueError("password=1234"), Untold("password=1234", secret="password=1234")])
async def test_unmapped_error_is_logged_and_not_told(method: str, error: Exception) -> None:
    with capture_logs() as logs:
        async with serve(Probe(fail_with(error))) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_method(channel, method)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    everything = f"{caught.value!r}{caught.value.trailing_metadata()}{rpc_status.from_call(caught.value)}"
    assert "1234" not in everything
    assert type(error).__name__ not in everything
    (line,) = [log for log in logs if log["event"] == "unmapped error"]
    assert line["log_level"] == "error"
    assert line["exc_info"]


@pytest.mark.parametrize("method", ["GetBundle", "ReadBlob"])
async def test_cancelled_call_ends_its_handler_at_once(method: str) -> None:
    probe = Probe(hang)
    with capture_logs() as logs:
        async with serve(probe) as channel:
            call = asyncio.create_task(call_method(channel, method))
            await asyncio.wait_for(probe.entered.wait(), HANG_S)
            assert not probe.left.is_set()
            call.cancel()
            await asyncio.wait_for(probe.left.wait(), HANG_S)
            with pytest.raises(asyncio.CancelledError):
                await call
    assert [log for log in logs if log["log_level"] == "error"] == []


async def test_stream_that_waits_for_its_client_ends_when_the_client_goes() -> None:
    probe = Flood()
    async with serve(probe) as channel:
        call = stub(channel).ReadBlob(READ)
        await anext(aiter(call))
        await asyncio.sleep(0.1)  # until flow control holds the writer
        assert not probe.left.is_set()
        call.cancel()
        await asyncio.wait_for(probe.left.wait(), HANG_S)


async def test_abort_of_a_handler_passes() -> None:
    probe = Probe()

    async def abort() -> bundle_pb2.GetBundleResponse:
        assert probe.context is not None
        await probe.context.abort(grpc.StatusCode.ALREADY_EXISTS, "as it says")

    probe.answer = abort
    with capture_logs() as logs:
        async with serve(probe) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(channel).GetBundle(GET)
    assert [log for log in logs if log["log_level"] == "error"] == []
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ALREADY_EXISTS, "as it says")


async def test_malformed_request_is_the_callers_mistake() -> None:
    async with serve(Probe()) as channel:
        for call in (
            channel.unary_unary(f"/{SERVICE}/GetBundle")(b"\xff\xff"),
            channel.unary_stream(f"/{SERVICE}/ReadBlob")(b"\xff\xff"),
            channel.stream_stream(REFLECT)(iter([b"\xff\xff"])),
        ):
            await refused(call, "INVALID_ARGUMENT", "REQUEST_MALFORMED")


async def test_absent_and_unimplemented_methods_are_unimplemented() -> None:
    async with serve(Probe()) as channel:
        for call in (
            channel.unary_unary(f"/{SERVICE}/Absent")(b""),
            channel.unary_unary("/absent.Service/Method")(b""),
            channel.unary_unary("/grpc.health.v1.Health/List")(b"\xff\xff"),
            stub(channel).DeleteAlias(bundle_pb2.DeleteAliasRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_longest_error_fits_the_trailers_of_a_default_client() -> None:
    text = "😀" * 5000
    violations = tuple(FieldViolation(text, text, text) for _ in range(100))
    error = Overloaded(text, violations=violations, retry_after_s=1, prompt=text, path=text, name=text)
    async with serve(Probe(fail_with(error))) as channel:
        how = await refusal(stub(channel).GetBundle(GET))
    assert how.code is grpc.StatusCode.UNAVAILABLE
    assert how.fields
