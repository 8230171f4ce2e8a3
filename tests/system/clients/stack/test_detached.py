"""Services in the background, over stand-ins: started once, found again, ended by `kiln down`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kiln_client.cli.local.background import reach_services
from kiln_client.cli.main import main
from kiln_client.errors import Unavailable
from kiln_client.stack.home import StackRecord, read_record

from tests.processes import lives
from tests.servers.command import python_environment
from tests.system.clients.stack.conftest import gone

_START = "import asyncio, pathlib, sys; from kiln_client.cli.local.background import reach_services as reach; "
_START += "asyncio.run(reach(pathlib.Path(sys.argv[1]), [], print))"


@pytest.fixture
def home(tmp_path: Path, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose services are stand-ins."""
    environment = python_environment(stand_ins, STAND_IN_FOLDER=str(tmp_path))
    for name in ("PYTHONPATH", "STAND_IN_FOLDER"):
        monkeypatch.setenv(name, environment[name])
    yield tmp_path / "home"
    record = read_record(tmp_path / "home")
    if record is not None:
        os.kill(record.pid, signal.SIGKILL)


def reach(home: Path, *roots: Path) -> tuple[StackRecord, list[str]]:
    """Reaches the services as `kiln run` does; also gives what a person was told."""
    told: list[str] = []
    return asyncio.run(reach_services(home, roots, told.append)), told


def service_pid(home: Path, name: str) -> int:
    return int(json.loads((home.parent / f"{name}.json").read_text())["pid"])


def test_services_start_once_and_end(home: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    record, told = reach(home, root)
    assert record.is_detached
    assert record.model_roots == (str(home / "models"), str(root))
    assert told == [f"starting the services of {home}; `kiln down` ends them"]
    assert reach(home, root / "llama") == (record, [])
    pids = [record.pid, *(service_pid(home, name) for name in ("compiler", "runtime"))]
    assert main(["down", "--home", str(home)]) == 0
    assert read_record(home) is None
    assert not set(pids) & {process.pid for process in psutil.process_iter() if lives(process)}


def test_services_outlive_the_command_that_started_them(home: Path) -> None:
    subprocess.run([sys.executable, "-c", _START, str(home)], check=True, timeout=60, stdout=subprocess.DEVNULL)
    record = read_record(home)
    assert record is not None
    assert all(psutil.pid_exists(pid) for pid in (record.pid, service_pid(home, "runtime")))
    assert os.getpgid(record.pid) == record.pid, "a terminal's Ctrl-C does not reach them"
    assert main(["down", "--home", str(home)]) == 0
    assert gone(record.pid)


def test_what_was_killed_is_started_again(home: Path) -> None:
    first, _ = reach(home)
    compiler = service_pid(home, "compiler")
    os.kill(first.pid, signal.SIGKILL)
    assert gone(first.pid)
    assert read_record(home) is None
    assert gone(compiler)
    second, told = reach(home)
    assert second.pid != first.pid
    assert len(told) == 1


def test_two_commands_start_one_pair(home: Path) -> None:
    async def reach_twice() -> list[StackRecord]:
        return await asyncio.gather(*(reach_services(home, [], lambda _: None) for _ in range(2)))

    first, second = asyncio.run(reach_twice())
    assert first == second


def test_a_failure_is_told_with_the_log(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_COMPILER", '{"crash": 3}')
    with pytest.raises(Unavailable) as caught:
        reach(home)
    assert "cannot open the database" in caught.value.message
    assert str(home / "logs" / "services.log") in caught.value.message
