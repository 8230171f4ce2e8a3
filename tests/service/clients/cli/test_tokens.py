"""Tokens of the command line: `--token-file`, what a person is told who has none, and the token of a home."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kiln.runtime.v1 import runtime_pb2
from kiln_client.stack.home import StackRecord, announced

from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.cli.remote_commands import CALLS
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("KILN_TOKEN", "KILN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "token"
    path.write_text("t0\n")
    return path


def sent(server: ScriptedServer) -> set[str | None]:
    """What calls said of their caller."""
    return {metadata.get("authorization") for calls in server.metadata.values() for metadata in calls}


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_every_command_sends_the_token(
    server: ScriptedServer, kiln: Kiln, token_file: Path, words: tuple[str, ...]
) -> None:
    (token_file.parent / "config.yaml").write_text("{}")
    arguments = [str(token_file.parent / "config.yaml") if word == "-" else word for word in CALLS[words]]
    kiln(*words, *arguments, "--token-file", token_file, "--json")
    assert sent(server) == {"Bearer t0"}


@pytest.mark.parametrize(
    ("code", "reason", "advice"),
    [
        ("UNAUTHENTICATED", "TOKEN_MISSING", "give a token by --token-file, KILN_TOKEN or KILN_TOKEN_FILE"),
        ("UNAUTHENTICATED", "TOKEN_EXPIRED", "give a new token"),
        ("UNAUTHENTICATED", "TOKEN_INVALID", "give a token that the server's keys vouch for"),
        ("UNAUTHENTICATED", "CERTIFICATE_REVOKED", "a new client certificate"),
        ("UNAUTHENTICATED", "UNAUTHENTICATED", "give a token by --token-file"),
        ("PERMISSION_DENIED", "SCOPE_MISSING", "`kiln token` makes one from the key of a home, with --scope"),
        ("PERMISSION_DENIED", "DEPLOYMENT_FORBIDDEN", "with --deployment"),
        ("PERMISSION_DENIED", "ALIAS_FORBIDDEN", "with --alias"),
        ("PERMISSION_DENIED", "PERMISSION_DENIED", "ask the operator of the server"),
    ],
)
def test_a_refused_person_is_told_what_to_do(
    server: ScriptedServer, kiln: Kiln, code: str, reason: str, advice: str
) -> None:
    server.script("ResetKVCache", refusal(code, reason, "no"))
    person = kiln("reset-kv", "demo")
    assert person.exit_code == 1
    assert person.err.startswith(f"error: {code}/{reason}\n  no\n  ")
    assert advice in person.err
    assert kiln("reset-kv", "demo", "--json").error["reason"] == reason


def test_other_errors_have_no_advice(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("ResetKVCache", refusal("PERMISSION_DENIED", "PATH_OUTSIDE_IMPORT_ROOTS", "no"))
    assert kiln("reset-kv", "demo").err == "error: PERMISSION_DENIED/PATH_OUTSIDE_IMPORT_ROOTS\n  no\n"


def test_a_token_does_not_leave_this_host_in_plaintext(kiln: Kiln, token_file: Path) -> None:
    words = ("status", "--runtime", "kiln.invalid:443", "--token-file", token_file, "--json")
    assert kiln(*words).error["reason"] == "TOKEN_IN_PLAINTEXT"
    assert kiln(*words, "--allow-plaintext-token").error["reason"] == "CONNECTION_FAILED"


def test_ps_asks_with_the_token_of_its_home(
    server: ScriptedServer, kiln: Kiln, token_file: Path, tmp_path: Path
) -> None:
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse())
    record = StackRecord(os.getpid(), server.address, server.address, (), is_detached=True, token_path=token_file)
    with announced(tmp_path, record):
        outcome = kiln("ps", "--home", tmp_path, "--json")
        assert str(token_file) in kiln("ps", "--home", tmp_path).out
    assert outcome.last["services"]["token_path"] == str(token_file)
    assert sent(server) == {"Bearer t0"}
