"""The gRPC server that our services run on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from edge.access.control import AccessControl
from edge.access.rules import Rules
from edge.config import EdgeConfig, TlsConfig
from edge.errors import AddressUnavailable
from edge.health import BACKGROUND, Health
from edge.interceptor import CallInterceptor, Surrounding
from edge.metrics import MetricRow, Sample
from edge.request_limit import RequestLimit
from edge.status import STATED, Codes
from edge.supervision import Supervisor
from edge.surroundings import AccessLog, ErrorStatuses, RunningCalls

__all__ = ["EdgeConfig", "EdgeServer", "TlsConfig"]

#: How long a cancelled handler may take to clean up.
CANCELLATION_TIMEOUT_S: Final = 5.0

# Lines of these files are `SLOT LOCAL REMOTE STATE …`, addresses `IP:PORT` in hexadecimal digits; see proc(5).
_TABLES: Final = ("tcp", "tcp6")
_ESTABLISHED: Final = "01"

_log = structlog.get_logger("edge")


class EdgeServer:
    """A gRPC server with health, reflection, error statuses, access log and a graceful end."""

    def __init__(
        self,
        config: EdgeConfig,
        *,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        codes: Codes = STATED,
        rules: Rules = MappingProxyType({}),
        always_serving: Sequence[str] = (),
        surroundings: Sequence[Surrounding] = (),
        request_limit: Callable[[], RequestLimit] | None = None,
        side_registers: Sequence[Callable[[grpc.aio.Server], None]] = (),
    ) -> None:
        """Builds the server; call it on the running event loop.

        Args:
            codes: Codes of the service's own, in place of those that errors state.
            rules: What each of their methods needs of its caller; one without a rule needs the scope admin.
            always_serving: Services that stay SERVING, and take calls, while the server drains.
            request_limit: Returns the size of the largest request that it takes now; None leaves that to `config`.
            side_registers: What adds its services to each of `config.side_addresses`, where health is the server's.
        """
        self._config = config
        self._access_log = AccessLog()
        #: Port of the metrics; None if they are not served.
        self.metrics_port: int | None = None
        #: Port of the local listener; None if there is none.
        self.local_port: int | None = None
        #: Ports of the side addresses.
        self.side_ports: list[int] = []
        self._port: int | None = None
        self._calls = RunningCalls(
            services,
            admitted_in_drain=always_serving,
            max_calls_per_client=config.max_calls_per_peer,
        )
        # Without it, everyone may do everything: a server that tells no clients apart has nothing to check.
        self._access: AccessControl | None = None
        local = config.local_listener
        if config.can_authenticate or local is not None:
            self._access = AccessControl(
                config.access,
                rules,
                is_required=config.requires_principal,
                has_client_ca=config.has_client_ca,
                local_principal=None if local is None else local.principal,
            )
        call_interceptor = CallInterceptor(
            (
                self._access_log,
                *surroundings,
                ErrorStatuses(codes),
                self._calls,
                *(() if self._access is None else (self._access,)),
            ),
            request_limit=request_limit,
            stall_timeout_s=config.stall_timeout_s,
            # Health watches and reflection streams last as long as their clients.
            may_stall=self._calls.counts,
        )
        # A handler cannot know the port that its call came to: each side address has a server of gRPC's own.
        self._server, *self._sides = self._servers = [
            grpc.aio.server(interceptors=(call_interceptor,), options=config.channel_options())
            for _ in (register, *side_registers)
        ]
        #: The health of the server as a whole, of `liveness`, of each service, and of names that others add.
        self.health = Health(services, always_serving=always_serving)
        #: What the server does in the background; the metrics have its failures.
        self.supervisor = Supervisor(partial(self.health.set_serving, BACKGROUND))
        for server, add in zip(self._servers, (register, *side_registers), strict=True):
            add(server)
            health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, server)
        if config.reflection:
            reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listens, and reports the services as SERVING unless `health` has another state; returns the port."""
        self.supervisor.watch_loop()
        if self._access is not None:
            await self._access.start(self.supervisor)
        credentials = self._config.tls.load() if self._config.tls is not None else None
        self._port = port = _listen(self._server, self._config.address, credentials)
        local = self._config.local_listener
        side_credentials = credentials
        if local is not None:
            side_credentials = grpc.local_server_credentials()
            self.local_port = _listen(self._server, local.address, side_credentials)
        for side, address in zip(self._sides, self._config.side_addresses, strict=True):
            self.side_ports.append(_listen(side, address, side_credentials))
        await self.health.publish()
        await asyncio.gather(*(server.start() for server in self._servers))
        _log.info("listening", host=self._config.host, port=port, tls=credentials is not None)
        if local is not None:
            _log.info("listening for one principal", port=self.local_port, principal=local.principal.name)
        if self.side_ports:
            _log.info("listening with fewer services", ports=self.side_ports)
        return port

    async def stop(self) -> None:
        """Ends the server at once: it cancels the calls that run."""
        await asyncio.gather(*(server.stop(None) for server in self._servers))

    def list_metrics(self) -> list[MetricRow]:
        """Returns the metrics of the server itself."""
        ended, calls, failures = self._access_log.ended, self._calls, self.supervisor.failures
        refusals: Mapping[str, int] = {} if self._access is None else self._access.refused
        counters = (
            ("kiln:refused_calls", "Calls of clients that had too many running", "method", calls.refused),
            ("kiln:stalled_calls", "Calls that ended because their clients did not read", "method", calls.stalled),
            (
                "kiln:access_refusals",
                "Calls of clients that were not known, not allowed, or over their quota",
                "reason",
                refusals,
            ),
            (
                "kiln:background_failures",
                "How often a task in the background failed or ended unasked",
                "task",
                failures,
            ),
        )
        return [
            MetricRow(
                "kiln:calls", "counter", "Calls that have ended", ("method", "code"), lambda: list(ended.items())
            ),
            MetricRow("kiln:running_calls", "gauge", "Calls that run", ("method",), partial(_by_label, calls.running)),
            *(
                MetricRow(name, "counter", text, (label,), partial(_by_label, counts))
                for name, text, label, counts in counters
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
        ports = (self._port, self.local_port, *self.side_ports)
        return sum(count_connections(port) for port in ports if port is not None)

    async def drain(self) -> None:
        """Ends the server.

        Health reports NOT_SERVING, new calls end with ShuttingDown, running calls get `drain_timeout_s` to finish. Then
        the server cancels the calls that still run. Services that always serve take calls until then.
        """
        await self.health.drain()
        self._calls.refuse_new()
        _log.info("draining", timeout_s=self._config.drain_timeout_s)
        finished = await self._calls.wait_idle(self._config.drain_timeout_s)
        await self.stop()
        await self.supervisor.close()
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
                _log.info("signalled again", signal=impatient.result().name)
                await self.stop()
            impatient.cancel()
            await draining
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressUnavailable(address) from error


def _by_label(counts: Mapping[str, int]) -> list[Sample]:
    return [((label,), count) for label, count in counts.items()]


def count_connections(port: int, tables: Path = Path("/proc/self/net")) -> int:
    """Counts established TCP connections to a port of this network namespace; 0 without the kernel's tables."""
    suffix, count = f":{port:04X}", 0
    for name in _TABLES:
        try:
            lines = (tables / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split(maxsplit=4)
            count += state == _ESTABLISHED and local.endswith(suffix)
    return count
