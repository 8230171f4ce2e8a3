"""Every method that a server registers has a rule, and only those that say so answer callers without a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio._server import Server

from compiler_svc.api.access_rules import RULES as COMPILER_RULES
from edge.access.rules import OPEN, SERVER_RULES, Rules
from runtime_svc.api.access_rules import RULES as RUNTIME_RULES
from runtime_svc.api.access_rules import make_engine_rules
from tests.servers.refusals import refused
from tests.servers.running_compiler import serve_compiler
from tests.servers.runtime import serve_runtime
from tests.servers.tokens import SigningKey, write_jwks

#: Answered with what the server is, and without a token.
OPEN_METHODS = {*SERVER_RULES, "/vllm.grpc.engine.VllmEngine/HealthCheck"}

Methods = dict[str, Any]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Methods:
    """The methods of all servers that the test starts."""
    methods: Methods = {}
    register = Server.add_generic_rpc_handlers

    def record(server: Server, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            methods.update(handler._method_handlers)
        register(server, handlers)

    monkeypatch.setattr(Server, "add_generic_rpc_handlers", record)
    return methods


def options(folder: Path) -> list[str]:
    return [f"--auth-jwks={write_jwks(folder / 'jwks.json', [SigningKey()])}", "--require-auth"]


async def refuse_all(channel: grpc.aio.Channel, registered: Methods, rules: Rules) -> None:
    """Calls every method without a token."""
    for method, handler in registered.items():
        if rules[method] == OPEN:
            continue
        open_call = channel.unary_stream if handler.response_streaming else channel.unary_unary
        await refused(open_call(method)(b""), "UNAUTHENTICATED", "TOKEN_MISSING")


async def test_every_method_of_the_runtime_has_a_rule(tmp_path: Path, registered: Methods) -> None:
    rules = {**SERVER_RULES, **RUNTIME_RULES, **make_engine_rules(lambda _: None)}
    async with serve_runtime(tmp_path, *options(tmp_path)) as served:
        # The BundleService that stands for the compiler is the test's.
        found = {method: one for method, one in registered.items() if not method.startswith("/kiln.bundle.")}
        assert set(found) == set(rules)
        assert {method for method, rule in rules.items() if rule == OPEN} == OPEN_METHODS
        await refuse_all(served.channel, found, rules)


async def test_every_method_of_the_compiler_has_a_rule(tmp_path: Path, registered: Methods) -> None:
    rules = {**SERVER_RULES, **COMPILER_RULES}
    async with serve_compiler(tmp_path, *options(tmp_path)) as (client, _):
        assert set(registered) == set(rules)
        assert {method for method, rule in rules.items() if rule == OPEN} == set(SERVER_RULES)
        await refuse_all(client.channel, registered, rules)
