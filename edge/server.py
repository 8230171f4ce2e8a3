"""The gRPC server that our services run on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Final

import grpc
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from bundle.errors import KilnError
from bundle.shortage import name_shortage
from edge.access.interceptor import AccessInterceptor
from edge.access.rules import Rules
from edge.access_log import AccessLogInterceptor, describe_call
from edge.config import EdgeConfig, TlsConfig
from edge.connections import count_connections
from edge.drain import NameClient, RunningCalls, peer_address
from edge.errors import AddressUnavailable
from edge.health import OVERALL, Health
from edge.metrics import MetricRow, Sample
from edge.request_limit import RequestLimit
from edge.rpc_handlers import Context, SurroundingInterceptor, Surroundings
from edge.status import EDGE_STATUSES, INTERNAL_REASON, StatusTable, is_mapped, message_for_log, status_from_error

#: How long a handler waits until gRPC has taken its status, which comes behind responses that no one reads.
STATUS_TIMEOUT_S: Final = 1.0

_log = structlog.get_logger("edge")


class StatusInterceptor(SurroundingInterceptor):
    """Ends a call with the status of the error that its handler raised.

    A shortage that the operating system reports becomes ResourcesShort. Another error that the table lacks becomes
    INTERNAL: the interceptor logs it with its traceback, and the client gets only the request id. Cancellation and
    deadlines are no errors, and pass.
    """

    decodes_inside = True

    def __init__(self, table: StatusTable, request_limit: Callable[[], RequestLimit] | None = None) -> None:
        """Takes the service's error classes and their codes, and what returns the size of the largest request."""
        self._table = {**EDGE_STATUSES, **table}
        self.request_limit = request_limit

    def surround(self, method: str) -> Surroundings:  # noqa: ARG002 - it is the same for every method
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
            reason = answered.reason if isinstance(answered, KilnError) else INTERNAL_REASON
            if answered is not error:
                _log.warning("a shortage", error=str(error))
            elif not is_mapped(error, self._table):
                _log.exception("unmapped error")
                reason = INTERNAL_REASON
            status = status_from_error(answered, self._table)
            describe_call(reason=reason, message=message_for_log(answered, self._table))
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


__all__ = ["EdgeConfig", "EdgeServer", "TlsConfig"]

#: How long a cancelled handler may take to clean up.
CANCELLATION_TIMEOUT_S: Final = 5.0

_log = structlog.get_logger("edge")


class EdgeServer:
    """A gRPC server with health, reflection, error statuses, access log and a graceful end."""

    def __init__(
        self,
        config: EdgeConfig,
        *,
        status_table: StatusTable,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        rules: Rules = MappingProxyType({}),
        always_serving: Sequence[str] = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        request_limit: Callable[[], RequestLimit] | None = None,
        name_client: NameClient = peer_address,
    ) -> None:
        """Builds the server; call it on the running event loop.

        Args:
            config: Address, limits, TLS.
            status_table: The code of each error class that handlers raise.
            services: Fully-qualified names of the services that `register` adds.
            register: Adds the servicers to the server.
            rules: What each of their methods needs of its caller; one without a rule needs the scope admin.
            always_serving: Services that stay SERVING, and take calls, while the server drains.
            interceptors: More of them, around what renders errors.
            request_limit: Returns the size of the largest request that the server takes now; None leaves the limit to
                `config`.
            name_client: Tells clients apart, each of which may have `max_calls_per_peer` calls.
        """
        self._config = config
        self._access_log = AccessLogInterceptor()
        #: Port of the metrics; None if they are not served.
        self.metrics_port: int | None = None
        #: Port of the local listener; None if there is none.
        self.local_port: int | None = None
        self._port: int | None = None
        self._calls = RunningCalls(
            services,
            admitted_in_drain=always_serving,
            max_calls_per_client=config.max_calls_per_peer,
            name_client=name_client,
            request_limit=request_limit,
            stall_timeout_s=config.stall_timeout_s,
        )
        # Without it, everyone may do everything: a server that tells no clients apart has nothing to check.
        self._access: AccessInterceptor | None = None
        local = config.local_listener
        if config.can_authenticate or local is not None:
            self._access = AccessInterceptor(
                config.access,
                rules,
                is_required=config.requires_principal,
                has_client_ca=config.has_client_ca,
                local_principal=None if local is None else local.principal,
                request_limit=request_limit,
                stall_timeout_s=config.stall_timeout_s,
            )
        self._server = grpc.aio.server(
            interceptors=(
                self._access_log,
                *interceptors,
                StatusInterceptor(status_table, request_limit),
                self._calls,
                *(() if self._access is None else (self._access,)),
            ),
            options=config.channel_options(),
        )
        register(self._server)
        self._services = frozenset((OVERALL, *services))
        #: The health of the server as a whole, of `liveness`, of each service, and of names that others add.
        self.health = Health(services, always_serving=always_serving)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self._server)
        if config.reflection:
            reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listens, and reports the services as SERVING unless `set_serving` has set another state.

        Returns:
            The port that it listens on.

        Raises:
            AddressUnavailable: The port is taken, or the host belongs to another machine.
            TlsFileInvalid: A certificate or key cannot be read.
            KeySetInvalid, IdentitiesInvalid: See `AccessInterceptor.start`.
        """
        if self._access is not None:
            await self._access.start()
        credentials = self._config.tls.load() if self._config.tls is not None else None
        self._port = port = self._listen(self._config.address, credentials)
        local = self._config.local_listener
        if local is not None:
            self.local_port = self._listen(local.address, grpc.local_server_credentials())
        await self.health.publish()
        await self._server.start()
        _log.info("listening", host=self._config.host, port=port, tls=credentials is not None)
        if local is not None:
            _log.info("listening for one principal", port=self.local_port, principal=local.principal.name)
        return port

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise AddressUnavailable(address) from error

    def list_metrics(self) -> list[MetricRow]:
        """Returns the metrics of the server itself."""
        ended = self._access_log.ended
        refused_access: Mapping[str, int] = {} if self._access is None else self._access.refused
        by_label = (
            ("kiln:running_calls", "gauge", "Calls that run", "method", self._calls.running),
            (
                "kiln:refused_calls",
                "counter",
                "Calls of clients that had too many running",
                "method",
                self._calls.refused,
            ),
            (
                "kiln:stalled_calls",
                "counter",
                "Calls that ended because their clients did not read",
                "method",
                self._calls.stalled,
            ),
            (
                "kiln:access_refusals",
                "counter",
                "Calls of clients that were not known, not allowed, or over their quota",
                "reason",
                refused_access,
            ),
        )
        return [
            MetricRow(
                "kiln:calls", "counter", "Calls that have ended", ("method", "code"), lambda: list(ended.items())
            ),
            *(
                MetricRow(name, kind, text, (label,), lambda counts=counts: _by_label(counts))  # type: ignore[misc]
                for name, kind, text, label, counts in by_label
            ),
            MetricRow(
                "kiln:max_connections",
                "gauge",
                "Connections that clients may have",
                (),
                lambda: [((), self._config.max_connections)],
            ),
            MetricRow(
                "kiln:connections",
                "gauge",
                "Connections of clients",
                (),
                lambda: [] if self._port is None else [((), self._count_connections())],
                is_slow=True,
            ),
        ]

    def _count_connections(self) -> int:
        return sum(count_connections(port) for port in (self._port, self.local_port) if port is not None)

    def set_serving(self, service: str, serving: bool) -> None:
        """Sets the health of one service, or of the server as a whole (`""`). Has no effect once the server drains."""
        assert service in self._services, f"{service!r} is none of {sorted(self._services)}"
        self.health.set_serving(service, serving)

    async def drain(self) -> None:
        """Ends the server.

        Health reports NOT_SERVING, new calls end with ShuttingDown, running calls get `drain_timeout_s` to finish. Then
        the server cancels the calls that still run. Services that always serve take calls until then.
        """
        await self.health.drain()
        self._calls.refuse_new()
        _log.info("draining", timeout_s=self._config.drain_timeout_s)
        finished = await self._calls.wait_idle(self._config.drain_timeout_s)
        await self._server.stop(None)
        if self._access is not None:
            await self._access.close()
        # Cancelled handlers may still be cleaning up.
        ended = finished or await self._calls.wait_idle(CANCELLATION_TIMEOUT_S)
        _log.info("stopped", calls_finished=finished, handlers_ended=ended)

    async def serve_until_signalled(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains. A second signal cancels the calls that still run."""
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        try:
            received = await signals.get()
            _log.info("signalled", signal=received.name)
            draining = asyncio.create_task(self.drain())
            impatient = asyncio.create_task(signals.get())
            await asyncio.wait({draining, impatient}, return_when=asyncio.FIRST_COMPLETED)
            if impatient.done():
                await self._server.stop(None)
            impatient.cancel()
            await draining
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _by_label(counts: Mapping[str, int]) -> list[Sample]:
    return [((label,), count) for label, count in counts.items()]
