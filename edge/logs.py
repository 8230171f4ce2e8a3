"""Structured logs: one JSON object per line and nothing else.

Our own loggers and those of libraries write through `logging`. Whatever else reaches standard error, from gRPC's C
core, child processes or the interpreter, becomes a line of its own while `open_logs` lasts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

import structlog

from bundle.host.file_modes import open_private, take_from_others
from edge.errors import LogFileInvalid
from edge.options import ABSOLUTE_PATH, COUNT, SIZE, one_of, option, option_class

LEVELS: Final = ("debug", "info", "warning", "error")

#: A longer line becomes several.
MAX_LINE_BYTES: Final = 1 << 20

#: How long the end of the process waits for lines that are under way. Children may keep the pipe open for longer.
_LAST_LINES_S: Final = 0.5
_STDERR_FD: Final = 2
#: The logger of gRPC's servers, and the name of their error if something could not be sent. Processes without gRPC log,
#: too, so this module does not import it.
_GRPC: Final = "grpc._cython.cygrpc"
_NOT_SENT: Final = "ExecuteBatchError"
#: A line of gRPC's C core, such as `E1122 08:15:00.123456 4711 add_port.cc:83] Failed to add port`.
_CORE_LINE: Final = re.compile(r"(?P<severity>[IWEF])\d{4} [\d:.]+ +\d+ (?P<source>\S+:\d+)\] (?P<text>.*)")
_CORE_LEVELS: Final = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
#: The attribute of a record whose line another process has rendered.
_RENDERED: Final = "rendered_line"


@option_class(slots=True)
class LogConfig:
    """What a server logs, and where. Older files are beside the current one, as `PATH.1` (the newest) and so on."""

    level: str = option(one_of(*LEVELS), "least severe level that is logged", name="log-level", default="info")
    path: Path | None = option(
        ABSOLUTE_PATH, "file of the log", name="log-file", default=None, default_text="standard error"
    )
    max_file_bytes: int = option(
        SIZE, "size at which a new log file begins", name="log-file-size", default=64 << 20, default_text="64MiB"
    )
    num_backups: int = option(COUNT, "older log files that are kept", name="log-file-backups", default=4)


def configure_logging(service: str, level: str = "info", handler: logging.Handler | None = None) -> None:
    """Configures this process's logs; lines go to standard error without `handler`.

    Every line has `timestamp` (ISO 8601, UTC), `level`, `event`, `service`, the event's own fields, and the fields that
    the call's context binds, such as `request_id`.
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
    formatter = _LineFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # At debug level these two write several lines about their own loops for every call.
    for library in ("asyncio", "grpc"):
        logging.getLogger(library).setLevel(max(logging.INFO, logging.getLevelName(level.upper())))
    logging.getLogger(_GRPC).addFilter(_tell_lost_clients)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


@contextmanager
def open_logs(service: str, config: LogConfig) -> Iterator[None]:
    """Writes the log of this process, and what it and its children write to standard error, until the context ends.

    Afterwards standard error is as before. If the log is a file, later events go to both. What a process that crashes
    writes in its last moment may be lost.
    """
    file = None if config.path is None else _open_file(config.path, config)
    original_fd = os.dup(_STDERR_FD)
    stderr = os.fdopen(original_fd, "w", encoding="utf-8", errors="backslashreplace")
    handler = file or logging.StreamHandler(stderr)
    configure_logging(service, config.level, handler)
    # `logging` reports its own failures, such as a full disk, on standard error; logged, they would fail again.
    logging.raiseExceptions = False
    sys.stderr.flush()
    read_fd, write_fd = os.pipe()
    os.dup2(write_fd, _STDERR_FD)
    os.close(write_fd)
    reader = threading.Thread(target=_log_lines, args=(read_fd, handler), name="stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original_fd, _STDERR_FD)
        reader.join(_LAST_LINES_S)
        if config.path is not None and not _is_open_as(config.path, original_fd):
            also = logging.StreamHandler(stderr)
            also.setFormatter(handler.formatter)
            logging.getLogger().addHandler(also)


def _is_open_as(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _open_file(path: Path, config: LogConfig) -> logging.Handler:
    try:
        for number in range(1, config.num_backups + 1):
            take_from_others(path.with_name(f"{path.name}.{number}"))
        return _PrivateFileHandler(
            path, maxBytes=config.max_file_bytes, backupCount=config.num_backups, encoding="utf-8"
        )
    except OSError as error:
        raise LogFileInvalid(str(path), error.strerror or str(error)) from error


class _PrivateFileHandler(RotatingFileHandler):
    """Makes files that only their owner may read."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=open_private)


def _tell_lost_clients(record: logging.LogRecord) -> bool:
    """Makes an event of what gRPC logs as an error with a traceback if a client is lost while a server answers it.

    The access log has the call's line, with the code CANCELLED if its handler had not ended.
    """
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != _NOT_SENT:
        return True
    record.msg, record.args, record.exc_info = "client lost: gRPC could not send it what ends its call", (), None
    record.levelno, record.levelname = logging.INFO, "INFO"
    return logging.getLogger().isEnabledFor(logging.INFO)


class _LineFormatter(structlog.stdlib.ProcessorFormatter):
    """Leaves lines as they are that another process has rendered."""

    def format(self, record: logging.LogRecord) -> str:
        rendered: str | None = getattr(record, _RENDERED, None)
        return super().format(record) if rendered is None else rendered


def _log_lines(read_fd: int, handler: logging.Handler) -> None:
    """Logs what arrives at a pipe, line by line, until its last writer has closed it."""
    with os.fdopen(read_fd, "rb") as pipe:
        while line := pipe.readline(MAX_LINE_BYTES):
            text = line.decode("utf-8", "backslashreplace").rstrip()
            if text:
                _log_line(text, handler)


def _log_line(text: str, handler: logging.Handler) -> None:
    logger = logging.getLogger("stderr")
    match = _CORE_LINE.fullmatch(text)
    if match is not None:
        logger.log(_CORE_LEVELS[match["severity"]], "%s", match["text"], extra={"source": match["source"]})
    elif _is_event(text):
        # Of a build, which has its own level. Its fields stay as they are.
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, "", (), None, extra={_RENDERED: text})
        handler.handle(record)
    else:
        logger.warning("%s", text, extra={"source": "stderr"})


def _is_event(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        return "event" in json.loads(text)
    except ValueError:
        return False
