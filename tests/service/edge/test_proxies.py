"""No proxy of the environment hears of what a server, or its health check, asks on this host."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from edge.access.errors import KeysUnavailable
from edge.access.key_source import KeyUrl
from edge.config import EdgeConfig, TlsConfig
from edge.health_check import check_health
from edge.supervision import Supervisor
from edge.tracing import Traces, open_tracing
from tests.hang_guard import HANG_S
from tests.servers.certificates import make_certificate
from tests.servers.key_issuer import Issuer
from tests.servers.probe import Probe, serve
from tests.servers.proxy import Proxy, running_proxy, set_proxies
from tests.servers.traces import collect_traces


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with running_proxy() as proxy:
        set_proxies(monkeypatch, proxy.url)
        yield proxy


async def ask_health(address: str, credentials: grpc.ChannelCredentials | None = None) -> str:
    return await asyncio.to_thread(check_health, address, credentials, "", HANG_S)


async def test_health_checks(proxy: Proxy, tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "server")
    tls = EdgeConfig("127.0.0.1:0", TlsConfig(own.certificate, own.key))
    async with serve(plain := Probe()), serve(secured := Probe(), tls):
        command = [sys.executable, "-m", "edge.health_check", plain.address]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert ended.stdout == "SERVING\n"
        assert await ask_health(f"localhost:{plain.address.rpartition(':')[2]}") == "SERVING"
        credentials = grpc.ssl_channel_credentials(own.certificate.read_bytes())
        assert await ask_health(secured.address, credentials) == "SERVING"
    assert proxy.heard == []


async def test_health_checks_of_other_hosts(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    await ask_health("kiln.invalid:1")
    assert proxy.heard[0] == "CONNECT kiln.invalid:1 HTTP/1.1"
    for no_proxy in (".invalid", "*"):
        set_proxies(monkeypatch, proxy.url, no_proxy=no_proxy)
        proxy.heard.clear()
        await ask_health("kiln.invalid:1")
        assert proxy.heard == []


async def test_keys(issuer: Issuer, proxy: Proxy) -> None:
    async with Supervisor(lambda _: None) as supervisor:
        await (source := KeyUrl(issuer.url)).start(supervisor)
        assert (await source.get()).keys
        assert proxy.heard == []
    with pytest.raises(KeysUnavailable):
        await KeyUrl("https://keys.invalid/").refresh()
    assert proxy.heard == ["CONNECT keys.invalid:443 HTTP/1.0"]


async def test_traces(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")

    async def trace(endpoint: str) -> None:
        async with open_tracing("probe", endpoint) as (traces,):
            assert isinstance(traces, Traces)
            traces._tracer.start_span("one").end()

    with collect_traces() as collector:
        await trace(collector.endpoint)
        assert [span.name for span in collector.spans] == ["one"]
    assert proxy.heard == []
    await trace("http://collector.invalid/v1/traces")
    assert proxy.heard[0] == "POST http://collector.invalid/v1/traces HTTP/1.1"
