"""The command behind containers' health checks, in a process of its own as containers run it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from edge.config import TlsConfig
from edge.server import EdgeConfig, EdgeServer
from edge.status import BUNDLE_STATUSES
from tests.servers.certificates import make_certificate
from tests.servers.probe import SERVICE


async def check(*words: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "edge.health_check", *map(str, words)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


async def start(tls: TlsConfig | None = None) -> tuple[EdgeServer, str]:
    config = EdgeConfig("127.0.0.1:0", tls=tls, drain_timeout_s=0.1)
    server = EdgeServer(config, status_table=BUNDLE_STATUSES, services=(SERVICE,), register=lambda server: None)
    return server, f"127.0.0.1:{await server.start()}"


async def test_a_server_is_healthy_until_it_drains() -> None:
    server, address = await start()
    assert await check(address) == (0, "SERVING\n")
    assert await check(address, "--service", SERVICE) == (0, "SERVING\n")
    server.set_serving(SERVICE, False)
    assert await check(address, "--service", SERVICE) == (1, "NOT_SERVING\n")
    code, heard = await check(address, "--service", "kiln.Unknown")
    assert (code, heard.split(":")[0]) == (1, "NOT_FOUND")
    await server.drain()
    code, heard = await check(address)
    assert (code, heard.split(":")[0]) == (1, "UNAVAILABLE")


async def test_mutual_tls(tmp_path: Path) -> None:
    ours, theirs = make_certificate(tmp_path, "server"), make_certificate(tmp_path, "client")
    server, address = await start(TlsConfig(ours.certificate, ours.key, theirs.certificate))
    trusting = (address, "--tls-ca", ours.certificate)
    try:
        assert await check(*trusting, "--tls-certificate", theirs.certificate, "--tls-key", theirs.key) == (
            0,
            "SERVING\n",
        )
        assert (await check(*trusting))[0] == 1
        assert (await check(address))[0] == 1
        assert (await check(address, "--tls-ca", theirs.certificate))[0] == 1
    finally:
        await server.drain()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("127.0.0.1:1", "--tls-key", "key.pem"),
        ("127.0.0.1:1", "--tls-key", "key.pem", "--tls-certificate", "certificate.pem"),
        ("127.0.0.1:1", "--tls-ca", "missing.pem"),
    ],
)
async def test_wrong_command_line(words: tuple[str, ...]) -> None:
    code, said = await check(*words)
    assert code == 2
    assert "usage: python -m edge.health_check" in said
