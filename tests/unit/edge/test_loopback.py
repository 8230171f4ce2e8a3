"""Which addresses are this host's own."""

from __future__ import annotations

import pytest

from edge.loopback import channel_options, is_local, is_local_url, is_loopback


@pytest.mark.parametrize("address", ["10.0.0.1:1", "localhost.evil.com:1", "dns:///localhost:1", "0.0.0.0:1", ""])
def test_what_others_may_be_at(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(
    "target",
    [
        *("127.0.0.1:1", "127.8.9.1:1", "localhost:1", "LocalHost:1", "[::1]:1", "[::ffff:127.0.0.1]:1"),
        *("dns:///localhost:1", "dns:localhost:1", "ipv4:127.0.0.1:1", "ipv6:[::1]:1"),
        *("unix:/run/kiln.sock", "unix:///run/kiln.sock", "unix-abstract:kiln"),
    ],
)
def test_targets_of_this_host_take_no_proxy(target: str) -> None:
    assert is_local(target)
    assert channel_options(target) == (("grpc.enable_http_proxy", 0),)


@pytest.mark.parametrize(
    "target", ["10.0.0.1:1", "kiln.example:443", "dns://127.0.0.1/kiln.example:1", "xds:///localhost:1"]
)
def test_other_targets_may_take_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    assert not is_local(target)
    assert channel_options(target) == ()
    monkeypatch.setenv("no_proxy", "*")
    assert channel_options(target) == (("grpc.enable_http_proxy", 0),)


def test_urls() -> None:
    assert all(map(is_local_url, ("http://127.0.0.1:4318/v1/traces", "https://[::1]/keys", "http://LOCALHOST")))
    assert not any(map(is_local_url, ("http://collector:4318", "https://127.0.0.1.example/", "https://a@b/127.0.0.1")))
