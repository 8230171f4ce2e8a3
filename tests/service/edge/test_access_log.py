import asyncio
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from bundle.errors import BlobNotFound
from edge.access_log import describe_call
from tests.servers.probe import GET, READ, SERVICE, Probe, answer, serve, stub

ABSENT = "sha256:" + "0" * 64

Logs = list[dict[str, Any]]


@pytest.fixture
def logs() -> Iterator[Logs]:
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured


def calls(logs: Logs) -> Logs:
    return [log for log in logs if log["event"] == "call"]


async def not_found() -> None:
    raise BlobNotFound(ABSENT)


async def crash() -> None:
    raise ZeroDivisionError


async def test_finished_call_is_one_line(logs: Logs) -> None:
    begun_s = time.perf_counter()
    async with serve(Probe()) as channel:
        await stub(channel).GetBundle(GET)
        assert len([response async for response in stub(channel).ReadBlob(READ)]) == 2
    taken_s = time.perf_counter() - begun_s
    unary, stream = calls(logs)
    assert unary["method"] == f"/{SERVICE}/GetBundle"
    assert stream["method"] == f"/{SERVICE}/ReadBlob"
    for line in (unary, stream):
        assert line["code"] == "OK"
        assert line["log_level"] == "info"
        assert line["peer"].startswith("ipv4:127.0.0.1:")
        assert 0 <= line["duration_s"] <= taken_s
        assert len(line["request_id"]) == 32
    assert unary["request_id"] != stream["request_id"]


async def test_duration_is_the_handlers(logs: Logs) -> None:
    probe = Probe()

    async def slow() -> Any:
        await asyncio.sleep(0.2)
        return await answer()

    probe.answer = slow
    async with serve(probe) as channel:
        begun_s = time.perf_counter()
        await stub(channel).GetBundle(GET)
        taken_s = time.perf_counter() - begun_s
    assert 0.19 <= calls(logs)[0]["duration_s"] <= taken_s


@pytest.mark.parametrize(("fail", "code", "level"), [(not_found, "NOT_FOUND", "info"), (crash, "INTERNAL", "error")])
async def test_failed_call_has_its_code(logs: Logs, fail: Any, code: str, level: str) -> None:
    probe = Probe()
    probe.answer = fail
    async with serve(probe) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub(channel).GetBundle(GET)
    (line,) = calls(logs)
    assert (line["code"], line["log_level"]) == (code, level)


async def test_refused_call_says_why(logs: Logs) -> None:
    probe = Probe()
    async with serve(probe) as channel:
        for fail in (not_found, crash):
            probe.answer = fail
            with pytest.raises(grpc.aio.AioRpcError):
                await stub(channel).GetBundle(GET)
        probe.answer = answer
        await stub(channel).GetBundle(GET)
    refused, crashed, served = calls(logs)
    assert refused["reason"] == "BLOB_NOT_FOUND"
    assert ABSENT in refused["message"]
    assert (crashed["reason"], crashed["message"]) == ("INTERNAL", "internal error")
    assert "reason" not in served


async def test_handlers_describe_their_call(logs: Logs) -> None:
    probe = Probe()

    async def describe_and_answer() -> Any:
        describe_call(deployment_id="chat", generated_tokens=3)
        return await answer()

    probe.answer = describe_and_answer
    async with serve(probe) as channel:
        await stub(channel).GetBundle(GET)
        probe.answer = answer
        await stub(channel).GetBundle(GET)
    described, other = calls(logs)
    assert (described["deployment_id"], described["generated_tokens"]) == ("chat", 3)
    assert "deployment_id" not in other


async def test_cancelled_call_and_missed_deadline_differ(logs: Logs) -> None:
    probe = Probe()
    probe.answer = probe.hang
    async with serve(probe) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub(channel).GetBundle(GET, timeout=0.2)
        await probe.left.wait()
        probe.left.clear()
        stream = stub(channel).ReadBlob(READ)
        await anext(aiter(stream))
        stream.cancel()
        await probe.left.wait()
    assert [line["code"] for line in calls(logs)] == ["DEADLINE_EXCEEDED", "CANCELLED"]


async def test_request_id_of_the_client_is_on_every_line_of_its_call(logs: Logs) -> None:
    probe = Probe()

    async def log_and_answer() -> Any:
        structlog.get_logger().info("inside")
        return await answer()

    probe.answer = log_and_answer
    async with serve(probe) as channel:
        requests = [f"request-{number}" for number in range(5)]
        await asyncio.gather(
            *(stub(channel).GetBundle(GET, metadata=(("x-request-id", request),)) for request in requests)
        )
    for event in ("inside", "call"):
        assert sorted(log["request_id"] for log in logs if log["event"] == event) == requests


async def test_request_id_comes_back_whatever_becomes_of_the_call(logs: Logs) -> None:
    probe = Probe()
    metadata = (("x-request-id", "abc-1"),)
    async with serve(probe) as channel:
        fine = stub(channel).GetBundle(GET, metadata=metadata)
        await fine
        stream = stub(channel).ReadBlob(READ, metadata=metadata)
        assert len([chunk async for chunk in stream]) == 2
        probe.answer = not_found
        failed = stub(channel).GetBundle(GET, metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            await failed
        for call in (fine, stream, failed):
            assert dict(await call.trailing_metadata())["x-request-id"] == "abc-1"
        unnamed = stub(channel).GetBundle(GET)
        with pytest.raises(grpc.aio.AioRpcError):
            await unnamed
        told = dict(await unnamed.trailing_metadata())["x-request-id"]
    # A client may have the answer before the call is logged; a server that has ended has logged all.
    assert told == calls(logs)[-1]["request_id"]


@pytest.mark.parametrize("request_id", ["", "x" * 129, "two words"])
async def test_unfit_request_id_is_replaced(logs: Logs, request_id: str) -> None:
    async with serve(Probe()) as channel:
        await stub(channel).GetBundle(GET, metadata=(("x-request-id", request_id),))
    assert len(calls(logs)[0]["request_id"]) == 32


async def test_health_checks_are_logged_at_debug(logs: Logs) -> None:
    async with serve(Probe()) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    (line,) = calls(logs)
    assert (line["method"], line["log_level"]) == ("/grpc.health.v1.Health/Check", "debug")
