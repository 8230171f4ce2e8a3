"""Structured logs: our own loggers and those of libraries write one JSON object per line to stderr."""

from __future__ import annotations

import logging
import sys
from typing import Final

import structlog

LEVELS: Final = ("debug", "info", "warning", "error")


def configure_logging(service: str, level: str = "info") -> None:
    """Configures this process's logs.

    Every line has `timestamp` (ISO 8601, UTC), `level`, `event`, `service`, the event's own fields, and the fields that
    the call's context binds, such as `request_id`.

    Args:
        service: Value of `service` in every line.
        level: Least severe level to write, one of LEVELS.
    """

    def add_service(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # At debug level these two write several lines about their own loops for every call.
    for library in ("asyncio", "grpc"):
        logging.getLogger(library).setLevel(max(logging.INFO, logging.getLevelName(level.upper())))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
