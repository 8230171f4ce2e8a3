"""What the gateway's container runs, with a program in SMG's place."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.servers.command import python_environment
from tests.servers.probe import Probe, serve
from tests.servers.proxy import running_proxy, set_proxies

ENGINE = "vllm.grpc.engine.VllmEngine"


async def test_it_starts_smg_when_the_runtime_serves_whatever_proxies_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg/__init__.py").touch()
    (tmp_path / "smg/__main__.py").write_text("import sys\nprint(sys.argv[1:5])\n")
    (tmp_path / "key").write_text("k")
    with running_proxy() as proxy:
        set_proxies(monkeypatch, proxy.url)
        async with serve(probe := Probe()):
            probe.server.health.set_serving(ENGINE, True)
            command = [sys.executable, ROOT / "deploy/gateway.py", "--runtime", probe.address]
            command += ["--adapter", "127.0.0.1:7012", "--api-key-file", tmp_path / "key"]
            ended = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, env=python_environment(tmp_path), check=False
            )
        assert ended.stdout.strip() == str(
            ["launch", "--worker-urls", f"grpc://{probe.address}", "grpc://127.0.0.1:7012"]
        )
        assert "SMG ended with 0" in ended.stderr
        assert proxy.heard == []
