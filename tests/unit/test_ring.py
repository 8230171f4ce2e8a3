"""The guard of this ring."""

from __future__ import annotations

import socket
import subprocess
import sys

import grpc
import pytest

from tests.unit.conftest import StartedInUnitTest


def test_a_process_is_refused() -> None:
    with pytest.raises(StartedInUnitTest, match=r"subprocess\.Popen"):
        subprocess.run([sys.executable, "--version"], check=True)


def test_a_server_is_refused() -> None:
    with pytest.raises(StartedInUnitTest, match=r"grpc\.server"):
        grpc.aio.server()
    with pytest.raises(StartedInUnitTest, match=r"socket\.bind"), socket.socket() as server:
        server.bind(("127.0.0.1", 0))
