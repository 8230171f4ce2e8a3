"""A home whose services a script answers for."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kiln.compiler.v1 import compiler_pb2
from kiln.runtime.v1 import runtime_pb2
from kiln_client.stack.home import announced

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.cli.run.scripted_models import (
    GIB,
    deployment,
    record,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    (path / "models").mkdir(parents=True)
    monkeypatch.setenv("KILN_HOME", str(path))
    return path


@pytest.fixture
def tiny(home: Path) -> Path:
    """A checkpoint below the model root."""
    path = home / "models" / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def services(server: ScriptedServer, home: Path) -> Iterator[ScriptedServer]:
    """Services in the background that compile, load and answer."""
    server.script("GetBundle", refusal("NOT_FOUND", "BUNDLE_NOT_FOUND"))
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(total_memory_bytes=8 * GIB))
    server.script("PlanCompile", samples.plan(largest=compiler_pb2.LargestSizes(batch_size=6, seq_len=1024)))
    server.script("Compile", samples.OPERATION)
    server.script("WatchCompile", [samples.watch_progress("LOWER"), samples.watch_result()])
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse())
    server.script("LoadBundle", [runtime_pb2.LoadBundleResponse(deployment=deployment())])
    server.script("Generate", samples.generation())
    with announced(home, record(server, home, is_detached=True)):
        yield server


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts lines on standard input."""

    def put(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return put
