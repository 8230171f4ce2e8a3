"""A Generate has one id, wherever it comes from: in its events, logs, error details, metadata, and for Abort."""

from __future__ import annotations

import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from tests.servers.logs import Logs, finished_calls
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, token_request


async def logged_ids(logs: Logs, count: int) -> list[str]:
    return [line["request_id"] for line in await finished_calls(logs, "/Generate", count)]


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

    wrong = served.generation.Generate(token_request([5], 3, request_id=field, temperature=-1), metadata=metadata)
    assert (await refused(wrong, "INVALID_ARGUMENT", "REQUEST_INVALID")).request_id == expected
    assert dict(await wrong.trailing_metadata())["x-request-id"] == expected
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
    await refused(served.generate([5], request_id="router-7"), "ALREADY_EXISTS", "REQUEST_ID_IN_USE")
    abort = pb.AbortRequest(deployment_id="d", request_id="router-7")
    assert (await served.generation.Abort(abort)).outcome == pb.AbortResponse.OUTCOME_ABORTED
    served.ranks.gate.set()
    await refused(call, "ABORTED", "REQUEST_ABORTED")


@pytest.mark.parametrize("request_id", ["x" * 129, "two words", "größe"])
async def test_field_that_is_no_id_is_refused(served: Runtime, logs: Logs, request_id: str) -> None:
    await served.deploy()
    how = await refused(
        served.generate([5], request_id=request_id), "INVALID_ARGUMENT", "REQUEST_INVALID", "request_id"
    )
    assert await logged_ids(logs, 1) == [how.request_id]
