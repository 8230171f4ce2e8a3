"""How calls fail, as a client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tests.repository import ROOT


@dataclass(frozen=True)
class Refusal:
    """An error as a client sees it."""

    code: grpc.StatusCode
    reason: str
    metadata: dict[str, str]
    #: Field → description.
    fields: dict[str, str]
    retry_after_s: float | None
    message: str
    #: Empty if the error names none.
    request_id: str = ""
    #: What a stream had sent before.
    events: list[Any] = field(default_factory=list, repr=False)


def read_refusal(status: status_pb2.Status, events: list[Any] | None = None) -> Refusal:
    info = unpack(status, error_details_pb2.ErrorInfo)
    assert info is not None
    assert info.domain == "kiln"
    retry = unpack(status, error_details_pb2.RetryInfo)
    bad = unpack(status, error_details_pb2.BadRequest)
    request = unpack(status, error_details_pb2.RequestInfo)
    return Refusal(
        code=next(code for code in grpc.StatusCode if code.value[0] == status.code),
        reason=info.reason,
        metadata=dict(info.metadata),
        fields={} if bad is None else {one.field: one.description for one in bad.field_violations},
        retry_after_s=None if retry is None else retry.retry_delay.ToTimedelta().total_seconds(),
        message=status.message,
        request_id="" if request is None else request.request_id,
        events=events or [],
    )


def unpack(status: status_pb2.Status, kind: type[Message]) -> Any:
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            return message
    return None


async def refusal(call: AsyncIterator[Any] | Awaitable[Any]) -> Refusal:
    """Awaits a call, or reads a stream, that must fail; returns how."""
    events: list[Any] = []
    try:
        if hasattr(call, "__aiter__"):
            async for event in call:
                events.append(event)  # noqa: PERF401 - those before the error count
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return read_refusal(rpc_status.from_call(error) or status_pb2.Status(), events)
    raise AssertionError("the call succeeded")


async def refused(
    call: AsyncIterator[Any] | Awaitable[Any], code: str, reason: str, /, *fields: str, **metadata: str
) -> Refusal:
    """Expects a call to fail, as `expect` says, without a word of this host's directories."""
    how = expect(await refusal(call), code, reason, *fields, **metadata)
    assert_names_no_directory(repr(how))
    return how


def expect(how: Refusal, code: str, reason: str, /, *fields: str, **metadata: str) -> Refusal:
    """Expects an error, with these fields and this metadata if any are named."""
    assert (how.code.name, how.reason) == (code, reason), how
    assert not fields or tuple(how.fields) == fields, how
    assert not metadata or how.metadata == metadata, how
    return how


def assert_names_no_directory(text: str) -> None:
    """Fails if a text that a client gets has a path of a test's files or of the code."""
    assert "/pytest-" not in text, text
    assert str(ROOT) not in text, text
