import json
import textwrap
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edge.errors import LogFileInvalid
from edge.logs import LogConfig, open_logs
from tests.snippets import run_python


def run_logging(code: str, level: str = "info") -> list[dict[str, Any]]:
    """Runs code in a fresh interpreter with our logs; returns the lines on stderr."""
    program = f"from edge.logs import configure_logging\nconfigure_logging('compiler', {level!r})\n{code}"
    result = run_python(program)
    assert result.stdout == ""
    return [json.loads(line) for line in result.stderr.splitlines()]


def test_lines_of_ours_and_of_libraries_are_json_with_the_common_fields() -> None:
    lines = run_logging(
        "import logging, structlog\n"
        "structlog.contextvars.bind_contextvars(request_id='r-1')\n"
        "structlog.get_logger('edge').info('started', port=8081, text='größer\\n')\n"
        "logging.getLogger('sqlalchemy').warning('slow %s', 'query', extra={'rows': 3})"
    )
    assert all(datetime.fromisoformat(line.pop("timestamp")).utcoffset() is not None for line in lines)
    common = {"service": "compiler", "request_id": "r-1"}
    assert lines == [
        common | {"event": "started", "level": "info", "port": 8081, "text": "größer\n"},
        common | {"event": "slow query", "level": "warning", "rows": 3},
    ]


def test_traceback_stays_in_its_line() -> None:
    lines = run_logging(
        "import logging, structlog\n"
        "for logger in (structlog.get_logger(), logging.getLogger('library')):\n"
        "    try:\n        1 / 0\n    except ZeroDivisionError:\n        logger.exception('failed')"
    )
    assert [(line["event"], line["level"]) for line in lines] == [("failed", "error")] * 2
    assert all(line["exception"].endswith("ZeroDivisionError: division by zero") for line in lines)


def test_a_lost_client_is_no_error_of_the_server() -> None:
    """gRPC logs what it could not send any more as an error with a traceback; its other errors stay."""
    code = (
        "import logging\nfrom grpc._cython import cygrpc\nlogger = logging.getLogger('grpc._cython.cygrpc')\n"
        "for error in (cygrpc.ExecuteBatchError('Failed'), ValueError('wrong')):\n"
        "    try:\n        raise error\n    except Exception:\n        logger.exception('raised in [%s]', 'M')"
    )
    lost, wrong = run_logging(code)
    assert (lost["level"], lost["event"].partition(":")[0], "exception" in lost) == ("info", "client lost", False)
    assert (wrong["level"], wrong["event"]) == ("error", "raised in [M]")
    assert wrong["exception"].endswith("ValueError: wrong")
    assert [line["level"] for line in run_logging(code, "warning")] == ["error"]


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


def run_open(code: str, config: str = "LogConfig()", *, afterwards: str = "") -> list[dict[str, Any]]:
    """Runs code while logs are open, and some when they are closed; returns the lines on stderr."""
    program = (
        "import logging, os, subprocess, sys, structlog\n"
        "from pathlib import Path\n"
        "from edge.logs import LogConfig, open_logs\n"
        f"with open_logs('runtime', {config}):\n" + textwrap.indent(code, "    ") + f"\n{afterwards}"
    )
    return [json.loads(line) for line in run_python(program).stderr.splitlines()]


def test_what_reaches_standard_error_otherwise_becomes_an_event() -> None:
    lines = run_open(
        "structlog.get_logger('edge').info('ours')\n"
        "print('printed', file=sys.stderr, flush=True)\n"
        "subprocess.run(['sh', '-c', 'echo of a child >&2'], check=True)\n"
        "os.write(2, b'E1122 08:15:00.123456    4711 add_port.cc:83] Failed to add port\\n')\n"
        "os.write(2, b'no text: \\xff')\n"
    )
    told = [(line["event"], line["level"], line.get("source"), line["service"]) for line in lines]
    assert sorted(told) == sorted(
        [
            ("ours", "info", None, "runtime"),
            ("printed", "warning", "stderr", "runtime"),
            ("of a child", "warning", "stderr", "runtime"),
            ("Failed to add port", "error", "add_port.cc:83", "runtime"),
            ("no text: \\xff", "warning", "stderr", "runtime"),
        ]
    )
    assert all(datetime.fromisoformat(line["timestamp"]).utcoffset() is not None for line in lines)


def test_lines_of_grpcs_core_are_events() -> None:
    lines = run_open(
        "import asyncio, grpc\n"
        "async def main():\n"
        "    servers = [grpc.aio.server(options=[('grpc.so_reuseport', 0)]) for _ in range(2)]\n"
        "    port = servers[0].add_insecure_port('127.0.0.1:0')\n"
        "    try:\n"
        "        servers[1].add_insecure_port(f'127.0.0.1:{port}')\n"
        "    except RuntimeError:\n"
        "        pass\n"
        "asyncio.run(main())\n"
    )
    assert any(line["level"] == "error" and ".cc:" in line["source"] for line in lines), lines


def test_events_of_a_child_pass_as_they_are() -> None:
    (line,) = run_open('print(\'{"event": "lowered", "service": "compiler-build"}\', file=sys.stderr)')
    assert line == {"event": "lowered", "service": "compiler-build"}


def test_a_file_is_rotated_and_holds_nothing_but_events(tmp_path: Path) -> None:
    path = tmp_path / "runtime.log"
    config = f"LogConfig(path=Path({str(path)!r}), max_file_bytes=2000, num_backups=2)"
    code = "for number in range(100):\n    logging.info('%d', number)\n    os.write(2, b'raw\\n')\n"
    assert run_open(code, config) == []
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["runtime.log", "runtime.log.1", "runtime.log.2"]
    assert all(file.stat().st_size <= 2000 for file in files)
    events = [json.loads(line)["event"] for file in reversed(files) for line in file.read_text().splitlines()]
    # A thread reads what is written to standard error, so raw lines may come late, and push numbers out.
    numbers = [event for event in events if event != "raw"]
    assert numbers == [str(number) for number in range(100 - len(numbers), 100)]
    assert len(events) > 20
    assert "raw" in events


def test_after_the_end_events_are_in_the_file_and_on_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "runtime.log"
    (line,) = run_open("pass", f"LogConfig(path=Path({str(path)!r}))", afterwards="logging.error('cannot serve')")
    assert line["event"] == json.loads(path.read_text())["event"] == "cannot serve"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    logs = open_logs("runtime", LogConfig(path=tmp_path / "absent/runtime.log"))
    with pytest.raises(LogFileInvalid, match=r"absent/runtime\.log: No such file or directory"), logs:
        pass
