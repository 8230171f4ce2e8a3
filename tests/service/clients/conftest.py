"""The scripted server and the command line, for every test of the clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from kiln_client import TlsOptions
from kiln_client.cli.main import main

from tests.servers import responses as samples
from tests.servers.authority import Authority
from tests.servers.scripted_server import ScriptedServer


@dataclass(frozen=True)
class Outcome:
    """What one run of the command line left."""

    exit_code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output of a run with --json."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1]

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a run with --json that failed."""
        assert self.exit_code != 0
        error: dict[str, Any] = self.last["error"]
        return error


Kiln = Callable[..., Outcome]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def compiling(server: ScriptedServer) -> ScriptedServer:
    """The server with an operation, which a test says how to watch."""
    server.script("Compile", samples.OPERATION)
    server.script("ShardWeights", samples.OPERATION)
    server.script("ShardAdapter", samples.OPERATION)
    server.script("QuantizeWeights", samples.OPERATION)
    server.script("CancelOperation", Empty())
    return server


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[ScriptedServer, TlsOptions]]:
    """A server that speaks TLS, and what its clients trust."""
    authority = Authority(tmp_path)
    certificate_path, key_path = authority.issue("server")
    server = ScriptedServer(grpc.ssl_server_credentials([(key_path.read_bytes(), certificate_path.read_bytes())]))
    yield server, TlsOptions(authority.path)
    server.stop()


@pytest.fixture
def kiln(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Kiln:
    """Runs the command line in this process, both services being the scripted server."""
    monkeypatch.setenv("KILN_COMPILER", server.address)
    monkeypatch.setenv("KILN_RUNTIME", server.address)

    def run(*words: object) -> Outcome:
        capfd.readouterr()
        exit_code = main([str(word) for word in words])
        captured = capfd.readouterr()
        return Outcome(exit_code, captured.out, captured.err)

    return run


@pytest.fixture
def nothing_given(kiln: Kiln, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without addresses and tokens, and without a home that has some."""
    for name in ("KILN_COMPILER", "KILN_RUNTIME", "KILN_TOKEN", "KILN_TOKEN_FILE", "KILN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
