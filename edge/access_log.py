"""Writes one log line for every finished call."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import grpc
import structlog

from edge.request_id import REQUEST_ID, REQUEST_ID_KEY
from edge.rpc_handlers import Context, SurroundingInterceptor, Surroundings, is_probe, noting_code

_SERVER_FAULTS: Final = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})

_log = structlog.get_logger("edge")


def describe_call(**fields: object) -> None:
    """Adds fields to the line of the call that this is called in, and to every later line of it."""
    structlog.contextvars.bind_contextvars(**fields)


class AccessLogInterceptor(SurroundingInterceptor):
    """Logs method, peer, code and duration, and gives the call its request id; see `bind_request_id`.

    The id is the client's `x-request-id` if that is one, otherwise a new one. A handler may bind the id of its request.
    """

    def __init__(self) -> None:
        """Starts with no call counted."""
        #: Calls that have ended, by method and code.
        self.ended: Counter[tuple[str, str]] = Counter()

    def surround(self, method: str) -> Surroundings:
        """Logs every call."""
        return partial(_log_call, method, self.ended)


def bind_request_id(context: Context, request_id: str) -> None:
    """Makes this the id of the running call: in each line that it logs, its error details and its trailing metadata.

    The metadata trails, because gRPC retries no call whose initial metadata has reached the client.
    """
    structlog.contextvars.bind_contextvars(request_id=request_id)
    context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))


def bound_request_id() -> str:
    """Returns the id of the running call."""
    return str(structlog.contextvars.get_contextvars()["request_id"])


@asynccontextmanager
async def _log_call(method: str, ended: Counter[tuple[str, str]], context: Context) -> AsyncIterator[None]:
    # gRPC runs every call in a task of its own, so the binding ends with the call.
    bind_request_id(context, _find_request_id(context.invocation_metadata() or ()))
    start_s = time.monotonic()

    def log_end(code: grpc.StatusCode) -> None:
        ended[method, code.name] += 1
        _log.log(
            _choose_level(method, code),
            "call",
            method=method,
            peer=context.peer(),
            code=code.name,
            duration_s=round(time.monotonic() - start_s, 6),
        )

    with noting_code(context, log_end):
        yield


def _choose_level(method: str, code: grpc.StatusCode) -> int:
    if code in _SERVER_FAULTS:
        return logging.ERROR
    return logging.DEBUG if is_probe(method) else logging.INFO


def _find_request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex
