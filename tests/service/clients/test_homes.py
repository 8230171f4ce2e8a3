"""Who names no address gets the services of the home that run, as `kiln run` leaves them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln.runtime.v1 import runtime_pb2
from kiln_client import AsyncBundles, AsyncRuntime, TlsOptions
from kiln_client.stack.home import StackRecord, announced

from tests.servers.scripted_server import ScriptedServer
from tests.service.clients.conftest import Kiln

pytestmark = pytest.mark.usefixtures("nothing_given")


@contextmanager
def services_at(home: Path, address: str, tls: TlsOptions | None = None) -> Iterator[StackRecord]:
    """A home whose services listen at one address."""
    home.mkdir(parents=True)
    record = StackRecord(os.getpid(), address, address, (), is_detached=True, tls=tls)
    with announced(home, record):
        yield record


@pytest.mark.parametrize("home", ["data/kiln", ".kiln", "chosen"])
def test_commands_find_the_services_of_the_home(
    kiln: Kiln, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    if home == "chosen":
        monkeypatch.setenv("KILN_HOME", str(tmp_path / home))
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(version="1"))
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse())
    server.script("ListBundles", bundle_pb2.ListBundlesResponse())
    server.script("ListOperations", operations_pb2.ListOperationsResponse())
    with services_at(tmp_path / home, server.address):
        for words in (["status"], ["bundles", "list"], ["operations", "list"]):
            assert kiln(*words).exit_code == 0, words
    refused = kiln("status")
    tried = f".kiln or {tmp_path}/data/kiln" if home == ".kiln" else f"{tmp_path / home}"
    assert f"connection to 127.0.0.1:50052, the default because no services run on {tried}, failed: " in refused.err


async def test_what_is_given_comes_before_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with services_at(tmp_path / "data/kiln", "127.0.0.1:1"):
        assert AsyncRuntime().address == AsyncBundles().address == "127.0.0.1:1"
        with services_at(tmp_path / ".kiln", "127.0.0.1:2"):
            assert AsyncRuntime().address == "127.0.0.1:2", "the home of this directory comes first"
            monkeypatch.setenv("KILN_RUNTIME", "127.0.0.1:3")
            assert AsyncRuntime().address == "127.0.0.1:3"
            assert AsyncBundles().address == "127.0.0.1:2"
            assert AsyncRuntime("127.0.0.1:4").address == "127.0.0.1:4"


async def test_the_services_of_a_home_are_called_as_they_serve(
    secured: tuple[ScriptedServer, TlsOptions], tmp_path: Path
) -> None:
    server, tls = secured
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(version="1"))
    with services_at(tmp_path / "data/kiln", server.address, tls):
        async with AsyncRuntime() as runtime:
            assert (await runtime.get_server_info()).version == "1"
