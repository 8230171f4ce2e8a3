import asyncio
import errno
from collections.abc import AsyncGenerator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2
from structlog.testing import capture_logs

from bundle.errors import BlobNotFound, FieldViolation, KilnError
from tests.hang_guard import HANG_S
from tests.servers.probe import CHUNK, GET, READ, SERVICE, Probe, call_method, serve, stub
from tests.unit.edge.test_status import detail

REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
ABSENT = "sha256:" + "0" * 64


class Overloaded(KilnError):
    reason = "OVERLOADED"


def rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    status = rpc_status.from_call(error)
    assert status is not None
    return status


async def fail_with(error: BaseException) -> bundle_pb2.GetBundleResponse:
    raise error


async def test_error_arrives_with_all_its_details() -> None:
    probe = Probe()
    violations = (FieldViolation("temperature", "-1", "0 or more"), FieldViolation("top_p", "2", "from 0 to 1"))
    error = Overloaded("try later", violations=violations, retry_after_s=0.5, queue="gênération", limit=8)
    probe.answer = lambda: fail_with(error)
    async with serve(probe, table={Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).GetBundle(GET, metadata=(("x-request-id", "abc-1"),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "try later"
    status = rich_status(caught.value)
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("kiln", "OVERLOADED")
    assert dict(info.metadata) == {"queue": "gênération", "limit": "8"}
    fields = detail(status, error_details_pb2.BadRequest).field_violations
    assert [(field.field, field.description) for field in fields] == [
        ("temperature", "got -1; accepted: 0 or more"),
        ("top_p", "got 2; accepted: from 0 to 1"),
    ]
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 500
    assert detail(status, error_details_pb2.RequestInfo).request_id == "abc-1"


async def test_stream_sends_what_it_has_and_then_the_error() -> None:
    probe = Probe()
    probe.answer = lambda: fail_with(BlobNotFound(ABSENT))
    async with serve(probe) as channel:
        responses = aiter(stub(channel).ReadBlob(READ))
        assert await anext(responses) == CHUNK
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(responses)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert detail(rich_status(caught.value), error_details_pb2.ErrorInfo).reason == "BLOB_NOT_FOUND"
    assert probe.left.is_set()


async def test_calls_without_errors_pass_unchanged() -> None:
    async with serve(Probe()) as channel:
        assert await stub(channel).GetBundle(GET) == bundle_pb2.GetBundleResponse()
        assert [response async for response in stub(channel).ReadBlob(READ)] == [CHUNK, CHUNK]


@pytest.mark.parametrize("method", ["GetBundle", "ReadBlob"])
async def test_a_shortage_of_the_host_is_named(method: str) -> None:
    probe = Probe()
    probe.answer = lambda: fail_with(OSError(errno.EMFILE, "Too many open files", "/secret"))
    async with serve(probe) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_method(channel, method)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the host is short of descriptors of this process: Too many open files"
    status = rich_status(caught.value)
    assert detail(status, error_details_pb2.ErrorInfo).reason == "RESOURCES_SHORT"
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToSeconds() == 30


@pytest.mark.parametrize("method", ["GetBundle", "ReadBlob"])
@pytest.mark.parametrize("error", [ValueError("password=1234"), Overloaded("password=1234", secret="password=1234")])
async def test_unmapped_error_is_logged_and_not_told(method: str, error: Exception) -> None:
    probe = Probe()
    probe.answer = lambda: fail_with(error)
    with capture_logs() as logs:
        async with serve(probe) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_method(channel, method)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error"
    everything = f"{caught.value!r}{caught.value.trailing_metadata()}{rich_status(caught.value)}"
    assert "1234" not in everything
    assert type(error).__name__ not in everything
    (line,) = [log for log in logs if log["event"] == "unmapped error"]
    assert line["log_level"] == "error"
    assert line["exc_info"]


@pytest.mark.parametrize("method", ["GetBundle", "ReadBlob"])
async def test_cancelled_call_ends_its_handler_at_once(method: str) -> None:
    probe = Probe()
    probe.answer = probe.hang
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


async def test_deadline_is_no_error_of_ours() -> None:
    probe = Probe()
    probe.answer = probe.hang
    with capture_logs() as logs:
        async with serve(probe) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(channel).GetBundle(GET, timeout=0.2)
            await asyncio.wait_for(probe.left.wait(), HANG_S)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [log for log in logs if log["log_level"] == "error"] == []


async def test_stream_that_waits_for_its_client_ends_when_the_client_goes() -> None:
    class Flood(Probe):
        async def ReadBlob(  # noqa: N802
            self, request: bundle_pb2.ReadBlobRequest, context: grpc.aio.ServicerContext[object, object]
        ) -> AsyncGenerator[bundle_pb2.ReadBlobResponse, None]:
            try:
                while True:
                    yield bundle_pb2.ReadBlobResponse(data=bytes(1 << 20))
            finally:
                self.left.set()

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
            anext(aiter(channel.unary_stream(f"/{SERVICE}/ReadBlob")(b"\xff\xff"))),
            anext(aiter(channel.stream_stream(REFLECT)(iter([b"\xff\xff"])))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert detail(rich_status(caught.value), error_details_pb2.ErrorInfo).reason == "REQUEST_MALFORMED"


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
    probe = Probe()
    text = "😀" * 5000
    violations = tuple(FieldViolation(text, text, text) for _ in range(100))
    error = Overloaded(text, violations=violations, retry_after_s=1, prompt=text, path=text, name=text)
    probe.answer = lambda: fail_with(error)
    async with serve(probe, table={Overloaded: grpc.StatusCode.UNAVAILABLE}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).GetBundle(GET)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(rich_status(caught.value), error_details_pb2.BadRequest).field_violations
