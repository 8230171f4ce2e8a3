"""The chat of `kiln run`, on services that a script answers for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kiln.runtime.v1 import runtime_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.cli.run.scripted_models import (
    asked,
    deployment,
)
from tests.service.clients.conftest import Kiln


def test_a_chat_remembers(services: ScriptedServer, kiln: Kiln, tiny: Path, say: Callable[..., None]) -> None:
    say("Hello", "", "And then?", "/reset", "Hello again", "/bye", "never asked")
    outcome = kiln("run", "tiny")
    assert (outcome.exit_code, outcome.out) == (0, "Once upon\n" * 3)
    first = ("user", "Hello")
    assert asked(services) == [
        [first],
        [first, ("assistant", "Once upon"), ("user", "And then?")],
        [("user", "Hello again")],
    ]


@pytest.mark.parametrize("has_sessions", [True, False])
def test_a_chat_is_a_session_where_there_are_some(
    services: ScriptedServer, kiln: Kiln, tiny: Path, say: Callable[..., None], has_sessions: bool
) -> None:
    made = deployment()
    made.capabilities.sessions = has_sessions
    services.script("LoadBundle", [runtime_pb2.LoadBundleResponse(deployment=made)])
    say("Hello", "And then?", "/reset", "Hello again")
    assert kiln("run", "tiny").exit_code == 0
    first, second, third = (request.session_id for request in services.requests["Generate"])
    assert first == second
    assert (third != first) is bool(first) is has_sessions


def test_a_chat_survives_a_refusal(services: ScriptedServer, kiln: Kiln, tiny: Path, say: Callable[..., None]) -> None:
    services.script("Generate", [refusal("INVALID_ARGUMENT", "PROMPT_TOO_LONG", "too long")], samples.generation())
    say("a book", "/what", "Hello")
    outcome = kiln("run", "tiny")
    assert outcome.exit_code == 0
    assert "PROMPT_TOO_LONG" in outcome.err
    assert "there is no /what" in outcome.err
    assert asked(services)[1] == [("user", "Hello")], "what was refused is not remembered"


def test_a_chat_ends_with_its_runtime(
    services: ScriptedServer, kiln: Kiln, tiny: Path, say: Callable[..., None]
) -> None:
    services.script("Generate", [refusal("UNAVAILABLE", "DRAINING")])
    say("Hello", "Hello?")
    assert kiln("run", "tiny").exit_code == 1
    assert len(services.requests["Generate"]) == 1


def test_a_chat_is_no_json(kiln: Kiln, tiny: Path) -> None:
    assert kiln("run", "tiny", "--json").error["reason"] == "USAGE_INVALID"
