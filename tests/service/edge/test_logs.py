import json
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from tests.repository import ROOT


def run_logging(code: str, level: str = "info") -> list[dict[str, Any]]:
    """Runs code in a fresh interpreter with our logs; returns the lines on stderr."""
    program = f"from edge.logs import configure_logging\nconfigure_logging('compiler', {level!r})\n{code}"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == ""
    return [json.loads(line) for line in result.stderr.splitlines()]


def test_line_is_json_with_the_common_fields() -> None:
    (line,) = run_logging(
        "import structlog\n"
        "structlog.contextvars.bind_contextvars(request_id='r-1')\n"
        "structlog.get_logger('edge').info('started', port=8081, text='größer\\n')"
    )
    timestamp = datetime.fromisoformat(line.pop("timestamp"))
    assert timestamp.utcoffset() is not None
    assert line == {
        "event": "started",
        "level": "info",
        "service": "compiler",
        "request_id": "r-1",
        "port": 8081,
        "text": "größer\n",
    }


def test_lines_of_libraries_look_the_same() -> None:
    (line,) = run_logging(
        "import logging, structlog\n"
        "structlog.contextvars.bind_contextvars(request_id='r-1')\n"
        "logging.getLogger('sqlalchemy').warning('slow %s', 'query', extra={'rows': 3})"
    )
    del line["timestamp"]
    assert line == {"event": "slow query", "level": "warning", "service": "compiler", "request_id": "r-1", "rows": 3}


@pytest.mark.parametrize("logger", ["structlog.get_logger()", "logging.getLogger('library')"])
def test_traceback_stays_in_its_line(logger: str) -> None:
    (line,) = run_logging(
        f"import logging, structlog\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    {logger}.exception('failed')"
    )
    assert line["event"] == "failed"
    assert line["level"] == "error"
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_level_filters_ours_and_libraries() -> None:
    code = (
        "import logging, structlog\n"
        "for logger in (structlog.get_logger('edge'), logging.getLogger('library'), logging.getLogger('grpc.aio')):\n"
        "    logger.debug('a'); logger.info('b'); logger.warning('c')"
    )
    assert [line["event"] for line in run_logging(code, "warning")] == ["c", "c", "c"]
    assert [line["event"] for line in run_logging(code)] == ["b", "c"] * 3
    # gRPC and asyncio log their own loops at debug level.
    assert [line["event"] for line in run_logging(code, "debug")] == ["a", "b", "c"] * 2 + ["b", "c"]
