"""Tokens of clients: where they are found, and where they are not sent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from kiln.bundle.v1.bundle_pb2 import GetBundleResponse
from kiln.runtime.v1 import runtime_pb2
from kiln_client import AsyncBundles, AsyncRuntime, Runtime, Timeouts, TlsOptions, errors
from kiln_client.errors import InvalidArgument, TokenUnusable
from kiln_client.stack.home import StackRecord, announced

from tests.hang_guard import HANG_S
from tests.servers import responses as samples
from tests.servers.proxy import running_proxy, set_proxies
from tests.servers.scripted_server import ScriptedServer, refusal

pytestmark = pytest.mark.usefixtures("nothing_given")

REMOTE = "kiln.example:443"


@pytest.fixture
def info(server: ScriptedServer) -> ScriptedServer:
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(version="1"))
    return server


def sent(server: ScriptedServer, rpc: str = "GetServerInfo") -> list[str | None]:
    """What each call said of its caller."""
    return [metadata.get("authorization") for metadata in server.metadata[rpc]]


def announced_home(home: Path, address: str, token: str) -> Any:
    """A home with a token, whose runtime listens at an address."""
    path = home / "auth" / "token"
    path.parent.mkdir(parents=True)
    path.write_text(token)
    return announced(home, StackRecord(os.getpid(), "127.0.0.1:1", address, (), is_detached=True, token_path=path))


async def test_the_argument_comes_before_the_variables_and_these_before_the_home(
    info: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def ask(token: str | Path | None = None) -> None:
        async with AsyncRuntime(info.address, token=token) as runtime:
            await runtime.get_server_info()

    (tmp_path / "file").write_text("of-the-file\n")
    (tmp_path / "argument").write_text("of-the-path")
    monkeypatch.setenv("KILN_HOME", str(tmp_path / "home"))
    with announced_home(tmp_path / "home", info.address, "of-the-home"):
        await ask()
        monkeypatch.setenv("KILN_TOKEN_FILE", str(tmp_path / "file"))
        await ask()
        monkeypatch.setenv("KILN_TOKEN", "of-the-variable")
        await ask()
        await ask("of-the-argument")
        await ask(tmp_path / "argument")
        await ask("")
    named = ("of-the-home", "of-the-file", "of-the-variable", "of-the-argument", "of-the-path")
    assert sent(info) == [*(f"Bearer {name}" for name in named), None]


async def test_the_token_of_a_home_is_for_its_services(info: ScriptedServer, tmp_path: Path) -> None:
    other = ScriptedServer()
    other.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(version="1"))
    try:
        with announced_home(tmp_path / "data/kiln", info.address, "of-the-home"):
            for address in (info.address, info.address.replace("127.0.0.1", "localhost"), other.address):
                async with AsyncRuntime(address) as runtime:
                    await runtime.get_server_info()
    finally:
        other.stop()
    assert sent(info) == ["Bearer of-the-home"] * 2
    assert sent(other) == [None]


async def test_the_directory_of_another_user_is_no_home(
    info: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The owner of `.kiln` in a directory that all may write to would choose a file of ours to be sent."""
    with announced_home(tmp_path / ".kiln", info.address, "of-the-home"):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        async with AsyncRuntime(info.address) as runtime:
            await runtime.get_server_info()
    assert sent(info) == [None]


async def test_a_file_is_read_again_when_it_has_changed(info: ScriptedServer, tmp_path: Path) -> None:
    path, new = tmp_path / "token", tmp_path / "new"
    path.write_text("first")
    async with AsyncRuntime(info.address, token=path) as runtime:
        await runtime.get_server_info()
        await runtime.get_server_info()
        new.write_text("other")  # of the same length
        new.replace(path)
        await runtime.get_server_info()
    assert sent(info) == ["Bearer first", "Bearer first", "Bearer other"]


def test_a_blocking_client_carries_it_too(info: ScriptedServer) -> None:
    with Runtime(info.address, token="t0") as runtime:
        runtime.get_server_info()
    assert sent(info) == ["Bearer t0"]


@pytest.mark.parametrize("text", ["", "two words", "tökén", "a\nb", "-----BEGIN PRIVATE KEY-----"])
async def test_a_file_without_a_token_is_named_and_not_repeated(
    info: ScriptedServer, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    async with AsyncRuntime(info.address, token=path) as runtime:
        with pytest.raises(TokenUnusable) as caught:
            await runtime.get_server_info()
        path.unlink()
        with pytest.raises(TokenUnusable, match="No such file"):
            await runtime.get_server_info()
    assert caught.value.code == "FAILED_PRECONDITION"
    assert str(path) in caught.value.message
    assert not text or text not in str(caught.value)
    assert sent(info) == []


@pytest.mark.parametrize("given", ["argument", "variable", "file"])
def test_a_token_does_not_leave_this_host_in_plaintext(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    (tmp_path / "file").write_text("t0")
    if given != "argument":
        name, value = ("KILN_TOKEN", "t0") if given == "variable" else ("KILN_TOKEN_FILE", str(tmp_path / "file"))
        monkeypatch.setenv(name, value)
    token = "t0" if given == "argument" else None
    with pytest.raises(InvalidArgument) as caught:
        AsyncRuntime(REMOTE, token=token)
    assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "TOKEN_IN_PLAINTEXT")
    assert REMOTE in caught.value.message
    assert "t0" not in str(caught.value)
    for address in ("localhost.example:1", "127.0.0.1.example:1", "128.0.0.1:1", "xds:///localhost:1"):
        with pytest.raises(InvalidArgument, match="in plaintext"):
            AsyncRuntime(address, token=token)
    for address in ("localhost:1", "127.1.2.3:1", "[::1]:1", "dns:///localhost:1", "unix:/run/kiln.sock"):
        AsyncRuntime(address, token=token)
    AsyncRuntime(REMOTE, token=token, tls=TlsOptions())
    AsyncRuntime(REMOTE, token=token, allow_plaintext_token=True)


async def test_no_proxy_hears_of_what_stays_on_this_host(
    info: ScriptedServer, secured: tuple[ScriptedServer, TlsOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, tls = secured
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse(version="1"))
    with running_proxy() as proxy:
        set_proxies(monkeypatch, proxy.url)
        async with AsyncRuntime(info.address, token="t0") as runtime:
            assert (await runtime.get_server_info()).version == "1"
        async with AsyncRuntime(server.address, tls=tls) as runtime:
            assert (await runtime.get_server_info()).version == "1"
        assert proxy.heard == []
        for no_proxy, num_heard in ((None, 1), ("other.example, .invalid", 0), ("*", 0)):
            set_proxies(monkeypatch, proxy.url, no_proxy=no_proxy)
            proxy.heard.clear()
            async with AsyncRuntime("kiln.invalid:1", timeouts=Timeouts(read_s=HANG_S)) as runtime:
                with pytest.raises(errors.Unavailable):
                    await runtime.get_server_info()
            assert proxy.heard[:1] == ["CONNECT kiln.invalid:1 HTTP/1.1"] * num_heard


async def test_over_tls(secured: tuple[ScriptedServer, TlsOptions]) -> None:
    server, tls = secured
    server.script("GetBundle", GetBundleResponse(bundle=samples.bundle()))
    async with AsyncBundles(server.address, tls=tls, token="t0") as bundles:
        await bundles.get_bundle("tiny")
    assert sent(server, "GetBundle") == ["Bearer t0"]


@pytest.mark.parametrize(
    ("code", "reason", "error_class"),
    [
        ("UNAUTHENTICATED", "TOKEN_MISSING", errors.Unauthenticated),
        ("PERMISSION_DENIED", "SCOPE_MISSING", errors.PermissionDenied),
    ],
)
async def test_refusals_are_named(
    server: ScriptedServer, code: str, reason: str, error_class: type[errors.KilnError]
) -> None:
    server.script("ResetKVCache", refusal(code, reason, "no", scope="load"))
    server.script("Generate", [refusal(code, reason, "no", scope="load")])
    async with AsyncRuntime(server.address) as runtime:
        for call in (runtime.reset_kv_cache("demo"), runtime.complete("demo", "x")):
            with pytest.raises(error_class) as caught:
                await call
            assert (caught.value.code, caught.value.reason) == (code, reason)
            assert caught.value.metadata == {"scope": "load"}
