"""A collector that takes traces as OpenTelemetry's does, OTLP over HTTP, and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN_ID = "b7ad6b7169203331"
#: The context that a traced client sends, as W3C writes it.
TRACED = (("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"),)
UNSAMPLED = (("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-00"),)


@dataclass
class Collector:
    """The endpoint, and the spans that have come so far."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def find(self, name: str) -> Any:
        """The one span of a name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def children(self, parent: Any) -> list[str]:
        """Names of the spans below another one, by their beginning."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return [span.name for span in sorted(found, key=lambda span: span.start_time_unix_nano)]

    def take(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(named["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans


@contextmanager
def collect_traces() -> Iterator[Collector]:
    """Runs a collector on loopback."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
