"""Serves metrics for Prometheus, over HTTP on a port of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.config import EdgeConfig, TlsConfig
from edge.errors import AddressUnavailable
from edge.histogram import Histogram

#: Long enough for a loop that a large message occupies; Prometheus itself waits for ten seconds.
SCRAPE_TIMEOUT_S: Final = 5.0

_log = structlog.get_logger("edge")

#: The values of a metric's labels, and its value.
Sample = tuple[tuple[str, ...], float | Histogram]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric: what it is called, and where a scrape reads its values.

    Attributes:
        name: Its name; that of a counter is without `_total`.
        kind: `gauge`, `counter` or `histogram`.
        read: Returns its samples. A histogram's are `Histogram`s.
        is_slow: Whether `read` takes long, and runs in the thread of a scrape: it must read nothing that the event loop
            changes.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[], Iterable[Sample]]
    is_slow: bool = False


class _LoopCollector(Collector):
    """Reads rows on the event loop, which alone changes what they read; slow ones in the thread of the scrape."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rows: Sequence[MetricRow]) -> None:
        self._loop = loop
        self._rows = rows

    def collect(self) -> Iterable[Metric]:
        """Returns every metric; called by the thread of a scrape."""
        slow = [_make_family(row) for row in self._rows if row.is_slow]
        return [*asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(SCRAPE_TIMEOUT_S), *slow]

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering reads nothing."""
        return ()

    async def _collect(self) -> list[Metric]:
        return [_make_family(row) for row in self._rows if not row.is_slow]


_FAMILIES: Final[Mapping[str, Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _make_family(row: MetricRow) -> Metric:
    family: Any = _FAMILIES[row.kind](row.name, row.help, labels=row.labels)
    for labels, value in row.read():
        if isinstance(value, Histogram):
            bounds = [*map(str, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric(labels, buckets, value.total)
        else:
            family.add_metric(labels, value)
    metric: Metric = family
    return metric


@asynccontextmanager
async def serve_metrics(config: EdgeConfig, rows: Sequence[MetricRow]) -> AsyncIterator[int | None]:
    """Serves metrics at the server's `metrics_address`, with its certificate if it has one, until the context ends.

    Beside `rows` it serves what Prometheus clients tell of every process: processor time, memory, open files, garbage
    collections. It yields the port; None if nothing is served.
    """
    if config.metrics_address is None:
        yield None
        return
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    registry.register(_LoopCollector(asyncio.get_running_loop(), rows))
    server, thread = _listen(config.metrics_address, config.tls, registry)
    _log.info("metrics", host=server.server_address[0], port=server.server_port, tls=config.tls is not None)
    try:
        yield int(server.server_port)
    finally:
        # Not on the loop: a scrape that is under way waits for it.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


def _listen(address: str, tls: TlsConfig | None, registry: CollectorRegistry) -> tuple[Any, Any]:
    host, _, port = address.rpartition(":")
    files: dict[str, Any] = {}
    if tls is not None:
        files = {"certfile": str(tls.certificate_path), "keyfile": str(tls.key_path)}
        if tls.client_ca_path is not None:
            files |= {"client_cafile": str(tls.client_ca_path), "client_auth_required": True}
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry, **files)
    except OSError as error:
        raise AddressUnavailable(address) from error
    server.set_app(_answer_text_only(server.get_app()))
    return server, thread


def _answer_text_only(app: Any) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """Makes an application answer in text: as OpenMetrics, prometheus-client 0.26 writes `_` for `:` in names."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        output: Iterable[bytes] = app(environ, start_response)
        return output

    return answer
