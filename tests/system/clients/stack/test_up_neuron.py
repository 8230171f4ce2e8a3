"""`kiln up` with the real services, on a host with NeuronCores that a stand-in for libnrt pretends to be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.runtime.v1 import runtime_pb2, runtime_pb2_grpc

from tests.hang_guard import HANG_S
from tests.neuron.host import nrt_library
from tests.neuron.stand_in import make_environment
from tests.servers.command import KILN

__all__ = ["nrt_library"]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `kiln up --target trn2` on free ports, in an environment with more variables."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **variables: str) -> subprocess.Popen[str]:
        addresses = ("--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0")
        command = [*KILN, "up", "--home", str(tmp_path / "home"), *addresses, "--target", "trn2", *words, "--json"]
        process = subprocess.Popen(
            command, env=os.environ | variables, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next object that the command prints."""
    assert process.stdout is not None
    event: dict[str, Any] = json.loads(process.stdout.readline())
    return event


def test_all_cores_of_the_host_serve(start: Start, nrt_library: Path, tmp_path: Path) -> None:
    process = start(**make_environment(nrt_library, tmp_path / "host", num_cores=3))
    ready = read(process)
    assert ready["event"] == "ready"
    token = (tmp_path / "home/auth/token").read_text().strip()
    with grpc.insecure_channel(ready["runtime"]) as channel:
        info = runtime_pb2_grpc.RuntimeServiceStub(channel).GetServerInfo(
            runtime_pb2.GetServerInfoRequest(), metadata=[("authorization", f"Bearer {token}")], timeout=HANG_S
        )
    assert (info.target, info.total_cores, info.free_cores) == ("trn2", 3, 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0


def test_host_without_the_library_is_refused_by_name(start: Start) -> None:
    process = start()
    error = read(process)["error"]
    assert process.wait(HANG_S) == 1
    assert error["reason"] == "SERVICE_EXITED"
    assert "NEURON_LIBRARY_MISSING" in error["message"]
    assert "install aws-neuronx-runtime-lib" in error["message"]


def test_fewer_cores_than_asked_for_are_refused_by_option(start: Start, nrt_library: Path, tmp_path: Path) -> None:
    process = start("--cores", "4", **make_environment(nrt_library, tmp_path / "host"))
    error = read(process)["error"]
    assert process.wait(HANG_S) == 1
    assert "cores: got 4; accepted: 1 to 2, the logical cores of this host" in error["message"]
