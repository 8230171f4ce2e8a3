"""Where a gateway listens, who may reach it, and what it takes."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from kiln_client.cli.local.lookup import deployment_name
from kiln_client.errors import FailedPrecondition, InvalidArgument
from kiln_client.stack.gateway import GatewayConfig, require_gateway


def parse(address: str, *, allow_insecure: bool = False) -> GatewayConfig:
    return GatewayConfig.parse(
        address, allow_insecure=allow_insecure, log_path=Path("log"), ready_timeout_s=1, stop_timeout_s=1
    )


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000),
        ("127.9.9.9:0", "127.9.9.9", 0),
        ("[::1]:65535", "::1", 65535),
        ("localhost:80", "localhost", 80),
    ],
)
def test_takes_loopback_addresses(address: str, host: str, port: int) -> None:
    config = parse(address)
    assert (config.host, config.port) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "8000", ":8000", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:-1", "::1:80", "http://127.0.0.1:80"]
)
def test_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(address, allow_insecure=True)
    assert caught.value.reason == "ADDRESS_INVALID"
    assert repr(address) in caught.value.fields[0].description


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "[::]:8000", "10.0.0.1:8000", "example.org:8000"])
def test_beyond_this_host_only_if_it_is_allowed(address: str) -> None:
    with pytest.raises(InvalidArgument, match="neither TLS nor authentication") as caught:
        parse(address)
    assert "--allow-insecure" in caught.value.fields[0].description
    assert parse(address, allow_insecure=True).port == 8000


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == "smg" else ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(FailedPrecondition) as caught:
        require_gateway()
    assert "kiln-client[openai]" in caught.value.message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("kiln-tiny", "kiln-tiny"),
        ("kiln-tiny.auto:v3", "kiln-tiny.auto"),
        ("llama@prod", "llama"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("sha256:0123456789abcdef0123", "0123456789ab"),
    ],
)
def test_deployments_are_named_before_their_bundle_is_known(text: str, name: str) -> None:
    assert deployment_name(text) == name
