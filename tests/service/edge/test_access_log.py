import asyncio
import time
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bundle.errors import BlobNotFound
from edge.interceptor import Context, describe_call, noting_code
from tests.servers.logs import Logs
from tests.servers.probe import GET, READ, SERVICE, Probe, answer, answer_after, fail_with, hang, serve, stub

ABSENT = "sha256:" + "0" * 64
LIST = reflection_pb2.ServerReflectionRequest(list_services="")
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def calls(logs: Logs) -> Logs:
    return [log for log in logs if log["event"] == "call"]


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
    async with serve(Probe(answer_after(lambda: asyncio.sleep(0.2)))) as channel:
        begun_s = time.perf_counter()
        await stub(channel).GetBundle(GET)
        taken_s = time.perf_counter() - begun_s
    assert 0.19 <= calls(logs)[0]["duration_s"] <= taken_s


async def test_failed_call_says_why(logs: Logs) -> None:
    probe = Probe()
    async with serve(probe) as channel:
        for error in (BlobNotFound(ABSENT), ZeroDivisionError()):
            probe.answer = fail_with(error)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub(channel).GetBundle(GET)
        probe.answer = answer
        await stub(channel).GetBundle(GET)
    refused, crashed, served = calls(logs)
    assert (refused["code"], refused["log_level"], refused["reason"]) == ("NOT_FOUND", "info", "BLOB_NOT_FOUND")
    assert ABSENT in refused["message"]
    assert (crashed["code"], crashed["log_level"], crashed["reason"]) == ("INTERNAL", "error", "INTERNAL")
    assert crashed["message"] == "internal error"
    assert "reason" not in served


async def test_handlers_describe_their_call(logs: Logs) -> None:
    async def describe() -> None:
        describe_call(deployment_id="chat", generated_tokens=3)

    probe = Probe(answer_after(describe))
    async with serve(probe) as channel:
        await stub(channel).GetBundle(GET)
        probe.answer = answer
        await stub(channel).GetBundle(GET)
    described, other = calls(logs)
    assert (described["deployment_id"], described["generated_tokens"]) == ("chat", 3)
    assert "deployment_id" not in other


async def test_cancelled_call_and_missed_deadline_differ(logs: Logs) -> None:
    probe = Probe(hang)
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
    assert [log for log in logs if log["log_level"] == "error"] == []


@pytest.mark.parametrize(
    ("remaining_s", "code"), [(None, "CANCELLED"), (1.0, "CANCELLED"), (0.04, "DEADLINE_EXCEEDED")]
)
async def test_client_s_deadline_passes_a_little_before_the_server_s(remaining_s: float | None, code: str) -> None:
    context = cast("Context", SimpleNamespace(code=lambda: None, time_remaining=lambda: remaining_s))
    noted: list[grpc.StatusCode] = []
    with pytest.raises(asyncio.CancelledError), noting_code(context, noted.append):
        raise asyncio.CancelledError
    assert [one.name for one in noted] == [code]


async def test_request_id_of_the_client_is_on_every_line_of_its_call(logs: Logs) -> None:
    async def log() -> None:
        structlog.get_logger().info("inside")

    async with serve(Probe(answer_after(log))) as channel:
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
        probe.answer = fail_with(BlobNotFound(ABSENT))
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


async def test_probes_are_logged_at_debug(logs: Logs) -> None:
    async with serve(Probe()) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([LIST]))
        assert [answer async for answer in reflected]
    levels = {line["method"]: line["log_level"] for line in calls(logs)}
    assert levels == {"/grpc.health.v1.Health/Check": "debug", REFLECT: "debug"}
