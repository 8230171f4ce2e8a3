"""A proxy that takes no call: it writes down what it was asked for, and closes the connection."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import pytest

#: Where programs look for a proxy, and for what needs none.
PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_EXCEPTIONS: Final = ("no_proxy", "no_grpc_proxy")


@dataclass
class Proxy:
    """The first line of each connection, as `CONNECT kiln.example:443 HTTP/1.1`; empty for one that said nothing."""

    url: str = ""
    heard: list[str] = field(default_factory=list)


@contextmanager
def running_proxy() -> Iterator[Proxy]:
    """Runs a proxy on loopback."""
    proxy = Proxy()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            proxy.heard.append(self.rfile.readline().decode("latin-1").strip())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


def set_proxies(monkeypatch: pytest.MonkeyPatch, url: str, *, no_proxy: str | None = None) -> None:
    """Names a proxy in every variable, for this process and those that it starts."""
    for name in PROXY_VARIABLES:
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, url)
    for name in _EXCEPTIONS:
        for spelling in (name, name.upper()):
            monkeypatch.delenv(spelling, raising=False)
    if no_proxy is not None:
        monkeypatch.setenv("no_proxy", no_proxy)
