"""Runs a server as a process: options, logs, and what becomes of errors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import structlog

from bundle.errors import KilnError
from bundle.host.confinement import SERVICE, confine
from edge.logs import LogConfig, configure_logging, open_logs


class _Settings(Protocol):
    """The part of a service's settings that this module reads."""

    @property
    def logs(self) -> LogConfig:
        """What is logged, and where."""


SettingsT = TypeVar("SettingsT", bound=_Settings)


def run_process(
    service: str,
    parse_settings: Callable[[Sequence[str]], SettingsT],
    serve: Callable[[SettingsT], Coroutine[Any, Any, None]],
) -> None:
    """Confines the process, reads the command line and serves. If an error ends that, logs it and exits with 1."""
    confine(SERVICE)
    configure_logging(service)
    try:
        settings = parse_settings(sys.argv[1:])
        with open_logs(service, settings.logs):
            asyncio.run(serve(settings))
    except KilnError as error:
        structlog.get_logger(service).error("cannot serve", reason=error.reason, error=str(error))
        sys.exit(1)
    except Exception:  # noqa: BLE001 - whatever it is, its traceback is an event too
        structlog.get_logger(service).exception("cannot serve")
        sys.exit(1)
