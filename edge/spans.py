"""Parts of a traced call, which are added to its trace once they are over. Knows neither gRPC nor OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

#: OpenTelemetry's tracer of the call that runs, also in tasks that the call begins; None if it is not traced.
TRACER: Final[ContextVar[Any]] = ContextVar("tracer", default=None)


def record_span(name: str, start_ns: int, duration_s: float, attributes: Mapping[str, str | int] | None = None) -> int:
    """Adds a part of the running call to its trace, if it has one; returns the part's end in nanoseconds since 1970."""
    end_ns = start_ns + round(duration_s * 1e9)
    tracer = TRACER.get()
    if tracer is not None:
        tracer.start_span(name, start_time=start_ns, attributes=attributes).end(end_ns)
    return end_ns
