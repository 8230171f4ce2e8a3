"""`kiln compile` over the death and the return of a real compiler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.servers.command import KILN, python_environment
from tests.servers.gateway import free_port

CONFIG = "neuron_config: {seq_len: 64, batch_size: 1, torch_dtype: float32}\n"
TIMEOUT_S = 120


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts the compiler of one home at one port, as often as it is called."""
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "address").write_text(address)
    home = tmp_path / "home"
    options = ["--address", address, "--store", str(home / "store"), "--cache", str(home / "cache")]
    options += ["--drain-timeout", "0.5"]
    command = [sys.executable, "-m", "compiler_svc", *options, "--model-root", str(ROOT / "examples/models")]
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        home.mkdir(exist_ok=True)
        with (home / "log").open("a") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready address={address}\n", (home / "log").read_text()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_compile_outlives_the_compiler(
    compiler: Callable[[], subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    first = compiler()
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    words = ["compile", str(config), "--model", "kiln-tiny", "--name", "tiny", "-O0", "--json"]
    environment = python_environment(KILN_COMPILER=(tmp_path / "address").read_text())
    with subprocess.Popen([*KILN, *words], env=environment, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        events = []
        while not events or events[-1]["event"] != "progress" or events[-1]["stage"] == "queued":
            events.append(json.loads(command.stdout.readline()))
        os.kill(first.pid, number)
        first.wait()
        compiler()
        out, _ = command.communicate(timeout=TIMEOUT_S)
    events += map(json.loads, out.splitlines())
    kinds = [event.get("event") for event in events]
    assert "reconnecting" in kinds, events
    assert kinds[-1] == "result", events
    assert events[-1]["version"] == "tiny:v1"
    assert events[-1]["operation"] == events[0]["operation"]
    assert command.returncode == 0
