"""`kiln up` with the real services, on a host with NeuronCores that a stand-in for libnrt pretends to be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from kiln.runtime.v1 import runtime_pb2, runtime_pb2_grpc

from tests.hang_guard import HANG_S
from tests.neuron.host import nrt_library
from tests.neuron.stand_in import make_environment
from tests.servers.tokens import bearer
from tests.system.clients.stack.conftest import Up

__all__ = ["nrt_library"]

Start = Callable[..., Up]


@pytest.fixture
def start(start_up: Start) -> Start:
    return lambda *words, **variables: start_up(os.environ | variables, "--target", "trn2", *words)


def test_all_cores_of_the_host_serve(start: Start, nrt_library: Path, tmp_path: Path) -> None:
    running = start(**make_environment(nrt_library, tmp_path / "host", num_cores=3))
    ready = running.read()
    assert ready["event"] == "ready"
    metadata = bearer((running.home / "auth/token").read_text().strip())
    with grpc.insecure_channel(ready["runtime"]) as channel:
        info = runtime_pb2_grpc.RuntimeServiceStub(channel).GetServerInfo(
            runtime_pb2.GetServerInfoRequest(), metadata=metadata, timeout=HANG_S
        )
    assert (info.target, info.total_cores, info.free_cores) == ("trn2", 3, 3)
    assert running.end(signal.SIGTERM) == 0


def test_host_without_the_library_is_refused_by_name(start: Start) -> None:
    running = start()
    error = running.fail()
    assert error["reason"] == "SERVICE_EXITED"
    assert "NEURON_LIBRARY_MISSING" in error["message"]
    assert "install aws-neuronx-runtime-lib" in error["message"]


def test_fewer_cores_than_asked_for_are_refused_by_option(start: Start, nrt_library: Path, tmp_path: Path) -> None:
    running = start("--cores", "4", **make_environment(nrt_library, tmp_path / "host"))
    error = running.fail()
    assert "cores: got 4; accepted: 1 to 2, the logical cores of this host" in error["message"]
