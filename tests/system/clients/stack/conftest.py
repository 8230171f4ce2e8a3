"""`kiln up` over stand-in services."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hang_guard import HANG_S
from tests.servers.command import KILN, python_environment

_MODULE = """import runpy, sys
sys.argv.insert(1, {name!r})
runpy.run_path({script!r}, run_name="__main__")
"""


@dataclass
class Up:
    """A running `kiln up --json`."""

    process: subprocess.Popen[str]
    folder: Path
    home: Path

    def read(self) -> dict[str, Any]:
        """The next object that it prints."""
        assert self.process.stdout is not None
        event: dict[str, Any] = json.loads(self.process.stdout.readline())
        return event

    def service(self, name: str) -> dict[str, Any]:
        """What the stand-in of a service left about itself."""
        path = self.folder / f"{name}.json"
        deadline = time.monotonic() + HANG_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def pid(self, name: str) -> int:
        return int(self.service(name)["pid"])

    def end(self, signal_number: int) -> int:
        self.process.send_signal(signal_number)
        return self.process.wait(HANG_S)

    def fail(self) -> dict[str, Any]:
        """The error with which it ends."""
        assert self.process.wait(HANG_S) == 1
        error: dict[str, Any] = self.read()["error"]
        return error

    def log(self, name: str) -> str:
        return (self.home / "logs" / f"{name}.log").read_text()


def gone(pid: int) -> bool:
    """Whether a process ends soon."""
    try:
        psutil.Process(pid).wait(HANG_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with stand-ins of both services' packages."""
    modules = tmp_path / "modules"
    for name in ("compiler", "runtime"):
        package = modules / f"{name}_svc"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        script = str(Path(__file__).with_name("stand_in.py"))
        (package / "__main__.py").write_text(_MODULE.format(name=name, script=script))
    return modules


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts `kiln up` on free ports, in an environment."""
    started: list[Up] = []

    def start(environment: Mapping[str, str], *words: object, as_json: bool = True) -> Up:
        addresses = ("--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0")
        home = tmp_path / "home"
        command = [*KILN, "up", "--home", str(home), *addresses, *map(str, words), *(["--json"] if as_json else [])]
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        started.append(Up(process, tmp_path, home))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()


@pytest.fixture
def up(tmp_path: Path, stand_ins: Path, start_up: Callable[..., Up]) -> Iterator[Callable[..., Up]]:
    """Starts it over stand-ins; keyword arguments are the behaviour of each."""

    def start(*words: object, as_json: bool = True, **behaviour: dict[str, int]) -> Up:
        variables = {f"STAND_IN_{name.upper()}": json.dumps(how) for name, how in behaviour.items()}
        environment = python_environment(stand_ins, STAND_IN_FOLDER=str(tmp_path), **variables)
        return start_up(environment, *words, as_json=as_json)

    yield start
    for record in tmp_path.glob("*.json"):
        for pid in (json.loads(record.read_text())["pid"], *json.loads(record.read_text())["litter"]):
            if psutil.pid_exists(pid):
                os.kill(pid, 9)
