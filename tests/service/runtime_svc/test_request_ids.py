"""A Generate has one id, wherever it comes from: in its events, logs, error details, metadata, and for Abort."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kiln.runtime.v1 import generation_pb2 as pb
from structlog.testing import capture_logs

from tests.hang_guard import HANG_S
from tests.servers.runtime import Runtime, fields_of, raises, token_request

Logs = list[dict[str, Any]]


@pytest.fixture
def logs() -> Iterator[Logs]:
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured


async def logged_ids(logs: Logs, count: int) -> list[str]:
    """The ids in the lines of `count` calls of Generate; a line may be written after the client has its answer."""

    def lines() -> list[str]:
        return [log["request_id"] for log in logs if log["event"] == "call" and log["method"].endswith("/Generate")]

    async with asyncio.timeout(HANG_S):
        while len(lines()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return lines()


def detailed_id(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.RequestInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return str(info.request_id)


@pytest.mark.parametrize(
    ("field", "metadata", "expected"),
    [
        ("mine", (), "mine"),
        ("", (("x-request-id", "router-7"),), "router-7"),
        ("mine", (("x-request-id", "router-7"),), "mine"),
    ],
)
async def test_one_id_everywhere(
    served: Runtime, logs: Logs, field: str, metadata: tuple[tuple[str, str], ...], expected: str
) -> None:
    await served.deploy()
    call = served.generation.Generate(token_request([5], 3, request_id=field), metadata=metadata)
    events = [event async for event in call]
    assert events[0].accepted.request_id == expected
    assert dict(await call.trailing_metadata())["x-request-id"] == expected

    refused = token_request([5], 3, request_id=field)
    refused.sampling.temperature = -1
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.generation.Generate(refused, metadata=metadata).read()
    assert detailed_id(caught[0]) == expected
    assert dict(caught[0].trailing_metadata())["x-request-id"] == expected
    assert await logged_ids(logs, 2) == [expected, expected]


async def test_id_that_the_server_made_is_the_same_everywhere(served: Runtime, logs: Logs) -> None:
    await served.deploy()
    call = served.generation.Generate(token_request([5], 3))
    events = [event async for event in call]
    made = events[0].accepted.request_id
    assert len(made) == 32
    assert dict(await call.trailing_metadata())["x-request-id"] == made
    assert await logged_ids(logs, 1) == [made]


async def test_abort_takes_the_id_of_the_metadata(served: Runtime) -> None:
    await served.deploy()
    served.ranks.gate.clear()
    call = served.generation.Generate(token_request([5], 40), metadata=(("x-request-id", "router-7"),))
    await anext(aiter(call))
    async with raises("ALREADY_EXISTS", "REQUEST_ID_IN_USE"):
        await served.generate([5], request_id="router-7")
    abort = pb.AbortRequest(deployment_id="d", request_id="router-7")
    assert (await served.generation.Abort(abort)).outcome == pb.AbortResponse.OUTCOME_ABORTED
    served.ranks.gate.set()
    async with raises("ABORTED", "REQUEST_ABORTED"):
        _ = [event async for event in call]


@pytest.mark.parametrize("request_id", ["x" * 129, "two words", "größe"])
async def test_field_that_is_no_id_is_refused(served: Runtime, logs: Logs, request_id: str) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.generate([5], request_id=request_id)
    assert fields_of(caught[0]) == ["request_id"]
    assert await logged_ids(logs, 1) == [detailed_id(caught[0])]
