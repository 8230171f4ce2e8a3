from dataclasses import replace
from pathlib import Path

import pytest

from edge.access.config import AccessConfig
from edge.access.errors import AnonymousRefused
from edge.config import EdgeConfig, TlsConfig
from edge.errors import AddressInvalid, PlaintextRefused, TlsFileInvalid

OPEN_TO_ALL = AccessConfig(allow_anonymous=True)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        ("127.1.2.3:65535", "127.1.2.3"),
        ("localhost:8081", "localhost"),
        ("[::1]:0", "::1"),
    ],
)
def test_plaintext_is_served_on_loopback(address: str, host: str) -> None:
    assert EdgeConfig(address).host == host


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.168.1.7:80", "example.com:1", "localhost.evil.com:1"])
def test_plaintext_beyond_loopback_must_be_allowed(address: str, tmp_path: Path) -> None:
    with pytest.raises(PlaintextRefused) as caught:
        EdgeConfig(address)
    assert caught.value.metadata == {"address": address}
    assert EdgeConfig(address, allow_insecure=True, access=OPEN_TO_ALL).address == address
    assert EdgeConfig(address, tls=TlsConfig(tmp_path, tmp_path), access=OPEN_TO_ALL).address == address


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.168.1.7:80", "example.com:1"])
def test_anonymous_clients_beyond_loopback_must_be_allowed(address: str, tmp_path: Path) -> None:
    tls = TlsConfig(tmp_path, tmp_path)
    with pytest.raises(AnonymousRefused) as caught:
        EdgeConfig(address, tls=tls)
    assert caught.value.metadata == {"address": address}
    assert not EdgeConfig(address, tls=tls, access=OPEN_TO_ALL).requires_principal
    by_token = EdgeConfig(address, tls=tls, access=AccessConfig(jwks="jwks.json"))
    by_certificate = EdgeConfig(address, tls=replace(tls, client_ca_path=tmp_path))
    for config in (by_token, by_certificate):
        assert config.requires_principal
        assert config.can_authenticate


def test_loopback_needs_no_principal_unless_it_is_told_to() -> None:
    assert not EdgeConfig("127.0.0.1:0").requires_principal
    assert not EdgeConfig("127.0.0.1:0", access=AccessConfig(jwks="jwks.json")).requires_principal
    assert EdgeConfig("127.0.0.1:0", access=AccessConfig(jwks="jwks.json", is_required=True)).requires_principal


@pytest.mark.parametrize(
    "address", ["", "localhost", ":80", "localhost:", "localhost:x", "localhost:65536", "::1:80", "a b:1", "http://x:1"]
)
def test_address_must_be_host_and_port(address: str) -> None:
    with pytest.raises(AddressInvalid) as caught:
        EdgeConfig(address, allow_insecure=True)
    (violation,) = caught.value.violations
    assert (violation.field, violation.value) == ("address", repr(address))
    with pytest.raises(AddressInvalid):
        EdgeConfig("127.0.0.1:0", allow_insecure=True, metrics_address=address)


def test_metrics_follow_the_rules_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(PlaintextRefused):
        EdgeConfig("127.0.0.1:0", metrics_address="0.0.0.0:0")
    assert EdgeConfig("127.0.0.1:0", metrics_address="0.0.0.0:0", allow_insecure=True).metrics_address
    assert EdgeConfig("127.0.0.1:0", metrics_address="0.0.0.0:0", tls=TlsConfig(tmp_path, tmp_path)).metrics_address


def test_idle_connections_are_pinged() -> None:
    """The other bounds are seen from outside, see `tests/service/edge`."""
    assert dict(EdgeConfig("127.0.0.1:0", keepalive_time_s=1.5).channel_options())["grpc.keepalive_time_ms"] == 1500


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
@pytest.mark.parametrize("broken", ["certificate", "key", "client_ca"])
def test_unreadable_tls_file_is_named(tmp_path: Path, broken: str, content: bytes | None) -> None:
    paths = {name: tmp_path / name for name in ("certificate", "key", "client_ca")}
    for name, path in paths.items():
        if name != broken:
            path.write_bytes(b"-----BEGIN CERTIFICATE-----\n")
        elif content is not None:
            path.write_bytes(content)
    with pytest.raises(TlsFileInvalid) as caught:
        TlsConfig(paths["certificate"], paths["key"], paths["client_ca"]).load()
    assert caught.value.metadata["path"] == str(paths[broken])
