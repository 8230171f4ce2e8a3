"""What the processes that the client starts inherit of its environment."""

from __future__ import annotations

import pytest
from kiln_client.stack.environment import ANY
from kiln_client.stack.gateway import GATEWAY
from kiln_client.stack.issuer import ISSUER
from kiln_client.stack.stack import COMPILER, RUNTIME

from bundle.host.environment import INHERITED

VARIABLES = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "KILN_TOKEN", "KILN_RUNTIME_CORES", "SMG_LOG_MM_TIMING", "TMPDIR")


def test_both_tables_give_the_same_to_every_process() -> None:
    assert INHERITED["any"] == ANY


def test_each_process_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, name)
    got = {one.name: one.environment.keys() & set(VARIABLES) for one in (COMPILER, RUNTIME, ISSUER, GATEWAY)}
    assert got == {
        "compiler": {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "KILN_RUNTIME_CORES", "SMG_LOG_MM_TIMING", "TMPDIR"},
        "runtime": {"KILN_RUNTIME_CORES", "SMG_LOG_MM_TIMING", "TMPDIR"},
        "token": {"TMPDIR"},
        "gateway": {"SMG_LOG_MM_TIMING", "TMPDIR"},
    }


def test_the_gateway_has_no_hub_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    assert GATEWAY.environment["HF_ENDPOINT"] == "http://127.0.0.1:0"
