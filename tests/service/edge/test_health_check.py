"""The command behind containers' health checks, once in a process of its own as containers run it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from edge.config import EdgeConfig, TlsConfig
from edge.health_check import main
from tests.servers.certificates import make_certificate
from tests.servers.probe import SERVICE, Probe, serve

Check = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], logs: list[object]) -> Check:
    """Runs the command in a thread; gives its exit code and what it says first. The server prints no logs between."""

    async def run(*words: object) -> tuple[int, str]:
        code = await asyncio.to_thread(main, list(map(str, words)))
        return code, capsys.readouterr().out.strip().partition(":")[0]

    return run


async def test_a_server_is_healthy_until_it_drains(check: Check) -> None:
    async with serve(probe := Probe()):
        command = [sys.executable, "-m", "edge.health_check", probe.address]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "SERVING\n", "")
        assert await check(probe.address, "--service", SERVICE) == (0, "SERVING")
        probe.server.health.set_serving(SERVICE, False)
        assert await check(probe.address, "--service", SERVICE) == (1, "NOT_SERVING")
        assert await check(probe.address, "--service", "kiln.Unknown") == (1, "NOT_FOUND")
    assert await check(probe.address) == (1, "UNAVAILABLE")


async def test_mutual_tls(tmp_path: Path, check: Check) -> None:
    ours, theirs = make_certificate(tmp_path, "server"), make_certificate(tmp_path, "client")
    config = EdgeConfig("127.0.0.1:0", tls=TlsConfig(ours.certificate, ours.key, theirs.certificate))
    async with serve(probe := Probe(), config):
        trusting = (probe.address, "--tls-ca", ours.certificate)
        shown = ("--tls-certificate", theirs.certificate, "--tls-key", theirs.key)
        assert await check(*trusting, *shown) == (0, "SERVING")
        for words in (trusting, (probe.address,), (probe.address, "--tls-ca", theirs.certificate)):
            assert (await check(*words))[0] == 1


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("127.0.0.1:1", "--tls-key", "key.pem"),
        ("127.0.0.1:1", "--tls-key", "key.pem", "--tls-certificate", "certificate.pem"),
        ("127.0.0.1:1", "--tls-ca", "missing.pem"),
    ],
)
def test_wrong_command_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "usage: python -m edge.health_check" in capsys.readouterr().err
