"""What every call runs inside: a log, the rendering of errors, a count of what runs."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import grpc
import structlog
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from bundle.host.shortage import name_shortage
from edge.errors import ClientStalled, ShuttingDown, TooManyCalls
from edge.interceptor import Context, Method, Surround, describe_call, is_probe, noting_code
from edge.request_id import REQUEST_ID, REQUEST_ID_KEY
from edge.status import INTERNAL_REASON, STATED, Codes, is_told, message_for_log, status_from_error

_SERVER_FAULTS: Final = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})
#: How long a handler waits until gRPC has taken its status, which comes behind responses that no one reads.
STATUS_TIMEOUT_S: Final = 1.0

_log = structlog.get_logger("edge")


class AccessLog:
    """Logs method, peer, code and duration, and gives the call its request id; see `bind_request_id`.

    The id is the client's `x-request-id` if that is one, otherwise a new one. A handler may take the id of its request.
    """

    def __init__(self) -> None:
        #: Calls that have ended, by method and code.
        self.ended: Counter[tuple[str, str]] = Counter()

    def surround(self, method: Method) -> Surround:
        """Logs every call."""
        return partial(_log_call, method.name, self.ended)


def bind_request_id(context: Context, request_id: str) -> None:
    """Makes this the id of the running call: in each line that it logs, its error details and its trailing metadata.

    The metadata trails, because gRPC retries no call whose initial metadata has reached the client.
    """
    structlog.contextvars.bind_contextvars(request_id=request_id)
    context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))


def take_request_id(context: Context, given: str) -> str:
    """Returns the id that a request has given itself, or that of the running call if it has given none.

    A valid id becomes that of the call; see `bind_request_id`. Another one is returned for validation to refuse.
    """
    if REQUEST_ID.fullmatch(given):
        bind_request_id(context, given)
    return given or str(structlog.contextvars.get_contextvars()["request_id"])


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


class ErrorStatuses:
    """Ends a call with the status of the error that its handler raised.

    A shortage that the operating system reports becomes ResourcesShort. Another error that clients are not told becomes
    INTERNAL: the log has it with its traceback, and the client gets only the request id. Cancellation and
    deadlines are no errors, and pass.
    """

    def __init__(self, codes: Codes = STATED) -> None:
        self._codes = codes

    def surround(self, method: Method) -> Surround:  # noqa: ARG002 - it is the same for every method
        """Renders the errors of every call."""
        return self._render_errors

    @asynccontextmanager
    async def _render_errors(self, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.BaseError:
            # gRPC's own errors: the handler has aborted the call, or its client is gone.
            raise
        except Exception as error:  # noqa: BLE001 - the last line before the wire
            answered = name_shortage(error) or error
            reason = answered.reason if is_told(answered, self._codes) else INTERNAL_REASON
            if answered is not error:
                _log.warning("a shortage", error=str(error))
            elif not is_told(error, self._codes):
                _log.exception("unmapped error")
            status = status_from_error(answered, self._codes)
            describe_call(reason=reason, message=message_for_log(answered, self._codes))
            request_id = structlog.contextvars.get_contextvars().get("request_id")
            if request_id is not None:
                status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
            rendered = rpc_status.to_status(status)
            # Aborting replaces the trailing metadata that the call has so far.
            metadata = (*rendered.trailing_metadata, *(context.trailing_metadata() or ()))
            try:
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    await context.abort(rendered.code, rendered.details, metadata)
            except TimeoutError:
                # gRPC goes on sending it; the handler ends, so that a client that does not read holds nothing here. Any
                # other error than that of `abort`, which comes too late, gRPC would log with a traceback.
                raise asyncio.CancelledError from None


def peer_address(context: Context) -> str:
    """Returns the address of a call's client without its port, such as `ipv4:10.0.0.7`; `unix:` for all of a host's."""
    peer: str = context.peer()
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class RunningCalls:
    """Counts the running calls of the given services, and those that clients stalled; can refuse new ones.

    It leaves alone calls of other services, such as health. A call is refused before its request is parsed.
    """

    def __init__(
        self,
        services: Iterable[str],
        *,
        admitted_in_drain: Iterable[str] = (),
        max_calls_per_client: int,
    ) -> None:
        """Counts no call yet; services that are `admitted_in_drain` take calls while the server drains."""
        #: Calls that run, by method.
        self.running: Counter[str] = Counter()
        #: Calls that were refused because their clients had too many, by method.
        self.refused: Counter[str] = Counter()
        #: Calls that ended because their clients did not read, by method.
        self.stalled: Counter[str] = Counter()
        self._max_calls_per_client = max_calls_per_client
        # Only of clients that have calls: addresses would add up.
        self._calls_of: dict[str, int] = {}
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._admitted = tuple(f"/{service}/" for service in admitted_in_drain)
        self._count = 0
        self._refusing = False
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse_new(self) -> None:
        """Makes every new call, but those of services that are never refused, end with ShuttingDown from now on."""
        self._refusing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no call runs, at most `timeout_s`; returns whether none runs."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._count == 0

    def counts(self, method: str) -> bool:
        """Tells whether the method is of a counted service."""
        return method.startswith(self._prefixes)

    def surround(self, method: Method) -> Surround | None:
        """Counts the calls of counted services."""
        return partial(self._count_call, method.name) if self.counts(method.name) else None

    @asynccontextmanager
    async def _count_call(self, method: str, context: Context) -> AsyncIterator[None]:
        client = peer_address(context)
        is_admitted = self._calls_of.get(client, 0) < self._max_calls_per_client
        self._count += 1
        self._idle.clear()
        self.running[method] += 1
        if is_admitted:
            self._calls_of[client] = self._calls_of.get(client, 0) + 1
        # Not when the handler returns: gRPC sends its last answer and the status after that.
        forget = partial(self._forget_call, method, client if is_admitted else None)
        context.add_done_callback(forget)  # type: ignore[arg-type] # the stubs want a class of theirs
        if not is_admitted:
            self.refused[method] += 1
            raise TooManyCalls(client, self._max_calls_per_client)
        if self._refusing and not method.startswith(self._admitted):
            raise ShuttingDown
        try:
            yield
        except ClientStalled:
            self.stalled[method] += 1
            raise

    def _forget_call(self, method: str, client: str | None, _context: Context) -> None:
        self._count -= 1
        self.running[method] -= 1
        if client is not None:
            self._calls_of[client] -= 1
            if not self._calls_of[client]:
                del self._calls_of[client]
        if self._count == 0:
            self._idle.set()
