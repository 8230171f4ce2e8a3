"""The scripted server and the command line, for every test of the clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kiln_client.cli.main import main

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


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def kiln(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs the command line in this process, both services being the scripted server."""
    monkeypatch.setenv("KILN_COMPILER", server.address)
    monkeypatch.setenv("KILN_RUNTIME", server.address)

    def run(*words: object) -> Outcome:
        capfd.readouterr()
        exit_code = main([str(word) for word in words])
        captured = capfd.readouterr()
        return Outcome(exit_code, captured.out, captured.err)

    return run
