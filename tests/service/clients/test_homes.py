"""Who names no address gets the services of the home that run, as `kiln run` leaves them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln.runtime.v1 import runtime_pb2
from kiln_client import AsyncBundles, AsyncRuntime, Runtime, TlsOptions
from kiln_client.stack.home import StackRecord, announced
from kiln_client.stack.issuer import renew_home_token

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


@pytest.fixture(params=["none", "no directory", "another user's", "no directory, by XDG"])
def no_home(
    request: pytest.FixtureRequest, nothing_given: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """A user who has no home, or none that can be used."""

    def find_no_user(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_DATA_HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", find_no_user)
    match request.param:
        case "no directory":
            monkeypatch.setenv("HOME", "/dev/null")
        case "no directory, by XDG":
            (tmp_path / "file").touch()
            monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
        case "another user's":
            # What the kernel says of a directory that this user may not enter, also to root.
            monkeypatch.setenv("HOME", str(tmp_path))
            (tmp_path / ".local/share/kiln").mkdir(parents=True)
            (tmp_path / ".local/share/kiln/services.json").symlink_to("services.json")
    return str(request.param)


def test_addresses_need_no_home(
    kiln: Kiln, server: ScriptedServer, no_home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(version="1"))
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse())
    server.script("ListBundles", bundle_pb2.ListBundlesResponse())
    for words in (["status", "--runtime"], ["bundles", "list", "--compiler"]):
        assert kiln(*words, server.address).exit_code == 0
    with Runtime(server.address) as runtime:
        assert runtime.get_server_info().version == "1"
    monkeypatch.setenv("KILN_RUNTIME", server.address)
    assert kiln("status").exit_code == 0
    monkeypatch.delenv("KILN_RUNTIME")
    refused = kiln("status", "--json")
    if no_home == "another user's":
        assert refused.error["reason"] == "HOME_UNREADABLE"
        assert "services.json" in refused.error["message"]
    else:
        assert refused.error["reason"] == "CONNECTION_FAILED"
        assert "the default because" in refused.error["message"]


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("no_home", ["none"], indirect=True)
def test_commands_of_a_home_ask_for_one(kiln: Kiln) -> None:
    refused = kiln("ps", "--json").error
    assert (refused["code"], refused["reason"]) == ("FAILED_PRECONDITION", "HOME_MISSING")
    assert "--home" in refused["message"]


@pytest.mark.parametrize("record", [b"{}", b'{"tls": null}', b"{no json}", b'{"tls": {}, "model_roots": []}', b"\xff}"])
def test_a_record_that_says_nothing_is_named(kiln: Kiln, tmp_path: Path, record: bytes) -> None:
    with services_at(tmp_path / ".kiln", "127.0.0.1:1"):
        path = tmp_path / ".kiln/services.json"
        path.write_bytes(record)
        refused = kiln("status", "--json").error
        assert (refused["code"], refused["reason"]) == ("FAILED_PRECONDITION", "HOME_UNREADABLE")
        assert refused["metadata"]["path"] == ".kiln/services.json"
        assert kiln("status", "--runtime", "127.0.0.1:1", "--json").error["reason"] == "CONNECTION_FAILED"


def test_a_record_that_is_no_file_is_named(kiln: Kiln, tmp_path: Path) -> None:
    (tmp_path / ".kiln/services.json").mkdir(parents=True)
    assert "Is a directory" in kiln("status", "--json").error["message"]


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("no_home", ["none"], indirect=True)
def test_a_token_of_a_user_without_a_name_asks_for_one(kiln: Kiln, tmp_path: Path) -> None:
    asyncio.run(renew_home_token(tmp_path / "signs"))
    words = ("token", "--home", tmp_path / "signs", "--scope", "infer", "--json")
    refused = kiln(*words).error
    assert (refused["code"], refused["reason"]) == ("INVALID_ARGUMENT", "SUBJECT_MISSING")
    assert kiln(*words, "--subject", "ada").last["subject"] == "ada"
