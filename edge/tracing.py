"""Traces of calls, by OpenTelemetry, which the extra `tracing` installs; without an endpoint nothing imports it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc
import structlog

from edge.errors import TracingUnavailable
from edge.interceptor import Context, Method, Surround, Surrounding, is_probe, noting_code
from edge.loopback import is_local_url
from edge.spans import TRACER

#: The codes for which OpenTelemetry's conventions call a server's span failed; others are the caller's affair.
_FAILURES: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class Traces:
    """Makes a span of every call, below the client's span that W3C's `traceparent` names, and binds its id for logs."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def surround(self, method: Method) -> Surround | None:
        """Traces every call but those of probes."""
        return None if is_probe(method.name) else partial(self._trace_call, method.name)

    @asynccontextmanager
    async def _trace_call(self, method: str, context: Context) -> AsyncIterator[None]:
        from opentelemetry import propagate, trace  # noqa: PLC0415 - of the extra

        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        service, _, name = method.removeprefix("/").partition("/")
        with self._tracer.start_as_current_span(
            f"{service}/{name}",
            propagate.extract(metadata),
            kind=trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            TRACER.set(self._tracer)
            structlog.contextvars.bind_contextvars(trace_id=format(span.get_span_context().trace_id, "032x"))

            def describe_end(code: grpc.StatusCode) -> None:
                span.set_attribute("rpc.grpc.status_code", code.value[0])
                if code in _FAILURES:
                    span.set_status(trace.StatusCode.ERROR, context.details() or code.name)

            with noting_code(context, describe_end):
                yield


@asynccontextmanager
async def open_tracing(service: str, endpoint: str | None) -> AsyncIterator[tuple[Surrounding, ...]]:
    """Exports traces until the context ends. OpenTelemetry's own variables (`OTEL_…`) set sampling and batches.

    The spans' `service.name` is `kiln-` and `service`. The endpoint takes OTLP over HTTP, such as
    `http://127.0.0.1:4318/v1/traces`; None exports nothing. Yields what a server's calls run inside: none without one.
    """
    if endpoint is None:
        yield ()
        return
    try:
        import requests  # noqa: PLC0415 - as all of the extra
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise TracingUnavailable(error.name or str(error)) from error
    provider = TracerProvider(resource=Resource.create({"service.name": f"kiln-{service}"}), shutdown_on_exit=False)
    session = None
    if is_local_url(endpoint):
        session = requests.Session()
        session.trust_env = False  # has the proxies
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, session=session)))
    try:
        yield (Traces(provider.get_tracer("kiln")),)
    finally:
        # It sends what is left, which may take seconds.
        await asyncio.to_thread(provider.shutdown)
