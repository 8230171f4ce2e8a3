"""Structured logs: one JSON object per line on stderr, of our own loggers and of every library's."""

from __future__ import annotations

import logging
import sys
from typing import Final

import structlog

LEVELS: Final = ("debug", "info", "warning", "error")


def configure_logging(service: str, level: str = "info") -> None:
    """Configures this process's logs.

    Every line has `timestamp` (ISO 8601, UTC), `level`, `event`, `service`, the event's own fields, and what is bound
    in the call's context, such as `request_id`.

    Args:
        service: Name of this process in the logs.
        level: Least severe level that is written, one of LEVELS.
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
    # At debug level these two write several lines for every call, of nothing but their own loops.
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
