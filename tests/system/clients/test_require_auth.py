"""`kiln up --require-auth`: with the token that they find, every command and both SDKs work; without it, none does."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kiln_client import Bundles, Compiler, Runtime, errors
from kiln_client.cli.main import main

from edge.access import errors as access_errors
from tests.servers.shared_bundles import SharedBundles
from tests.servers.stack import Stack
from tests.service.clients.cli.remote_commands import CALLS
from tests.system.conftest import CONFIG, TINY

Kiln = Callable[..., dict[str, Any]]
REFUSALS = {error.reason for error in access_errors.AccessError.__subclasses__()} | {
    error.reason for root in (access_errors.Unauthenticated, access_errors.Forbidden) for error in root.__subclasses__()
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, run_directory: Path) -> Iterator[Stack]:
    former = os.umask(0o022)
    try:
        services = Stack.start(
            tmp_path_factory.mktemp("guarded"),
            "--require-auth",
            cores=2,
            shared=SharedBundles(run_directory / "bundles"),
        )
    finally:
        os.umask(former)
    yield services
    assert services.stop() == 0


@pytest.fixture(scope="module")
def demo(guarded: Stack) -> Iterator[str]:
    """The shipped model: the runtime asks the compiler for it, with its own token."""
    guarded.provide("tiny", TINY, CONFIG)
    with guarded.deployed("demo", "tiny"):
        yield "demo"


@pytest.fixture
def kiln(guarded: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Kiln:
    """Runs a command in this process; gives the last object that it prints."""
    monkeypatch.setenv("KILN_COMPILER", guarded.compiler)
    monkeypatch.setenv("KILN_RUNTIME", guarded.runtime)
    monkeypatch.setenv("KILN_HOME", str(guarded.home))
    monkeypatch.chdir(tmp_path)
    for name in ("KILN_TOKEN", "KILN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: object) -> dict[str, Any]:
        capfd.readouterr()
        main([*map(str, words), "--json"])
        last: dict[str, Any] = json.loads(capfd.readouterr().out.splitlines()[-1])
        return last

    return run


def refusal(last: dict[str, Any]) -> str | None:
    """Why the caller was refused; None if it was not, whatever else went wrong."""
    reason: str | None = last.get("error", {}).get("reason")
    return reason if reason in REFUSALS else None


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_every_command_works_with_the_token_that_it_finds_and_not_without(
    kiln: Kiln, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    arguments = [str(tmp_path / "config.yaml") if word == "-" else word for word in CALLS[words]]
    last = kiln(*words, *arguments)
    assert refusal(last) is None
    assert last.get("error", {}).get("code") != "UNAVAILABLE"
    monkeypatch.setenv("KILN_HOME", str(tmp_path))
    assert refusal(kiln(*words, *arguments)) == "TOKEN_MISSING"


def test_load_and_generate(kiln: Kiln, demo: str) -> None:
    words = ("generate", "--deployment", demo, "--prompt", "Once upon a time", "--max-new-tokens", 8)
    assert kiln(*words)["event"] == "result"
    assert [one["id"] for one in kiln("ps")["deployments"]] == [demo]


def test_the_sdk(guarded: Stack, demo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_HOME", str(guarded.home))
    with Runtime(guarded.runtime) as runtime, Bundles(guarded.compiler) as bundles:
        assert runtime.complete(demo, "Once", max_new_tokens=4, ignore_eos=True).usage.generated_tokens == 4
        assert bundles.list_leases()
    with Runtime(guarded.runtime, token="") as runtime, Compiler(guarded.compiler, token="") as compiler:
        for call in (runtime.get_server_info, compiler.list_operations):
            with pytest.raises(errors.Unauthenticated) as caught:
                call()
            assert caught.value.reason == "TOKEN_MISSING"
    with Runtime(guarded.runtime, token="a.b.c") as runtime:
        with pytest.raises(errors.Unauthenticated) as caught:
            runtime.complete(demo, "Once")
        assert caught.value.reason == "TOKEN_INVALID"


def test_a_token_allows_what_it_says(guarded: Stack, demo: str, kiln: Kiln, tmp_path: Path) -> None:
    def make(name: str, *words: str) -> Path:
        kiln("token", "--out", tmp_path / name, *words)
        return tmp_path / name

    infer = make("infer", "--scope", "infer", "--deployment", "de*")
    other = make("other", "--scope", "infer", "--deployment", "other")
    promote = make("promote", "--scope", "promote", "--alias", "*@staging")
    generate = ("generate", "--deployment", demo, "--prompt", "Once", "--max-new-tokens", 4)
    assert kiln(*generate, "--token-file", infer)["event"] == "result"
    assert refusal(kiln("reset-kv", demo, "--token-file", infer)) == "SCOPE_MISSING"
    assert refusal(kiln(*generate, "--token-file", other)) == "DEPLOYMENT_FORBIDDEN"
    assert kiln("bundles", "alias", "tiny", "staging", "--token-file", promote)["alias"] == "staging"
    assert refusal(kiln("bundles", "alias", "tiny", "prod", "--token-file", promote)) == "ALIAS_FORBIDDEN"


def test_a_home_is_its_owners_alone(guarded: Stack, demo: str) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    home = guarded.home
    assert mode(home) == 0o700
    private = [
        *home.glob("kiln.db*"),
        *(home / "state" / "runtime").glob("runtime.db*"),
        *(home / "cache" / "runtime").glob("verified.db*"),
        *(home / "store").glob("verified.sqlite*"),
        *(home / "logs").iterdir(),
        home / "auth" / "key.pem",
        home / "auth" / "token",
    ]
    assert {path.name for path in private} >= {"kiln.db", "runtime.db", "verified.db", "compiler.log", "runtime.log"}
    assert {str(path): oct(mode(path)) for path in private if mode(path) != 0o600} == {}


def test_prompts_and_tokens_are_in_no_log(guarded: Stack, demo: str, kiln: Kiln) -> None:
    prompt = "an unmistakable prompt"
    kiln("generate", "--deployment", demo, "--prompt", prompt, "--max-new-tokens", 2)
    token = (guarded.home / "auth" / "token").read_text().strip()
    logs = "".join(path.read_text() for path in (guarded.home / "logs").iterdir())
    assert '"principal": "home"' in logs
    assert prompt not in logs
    assert token.rpartition(".")[2] not in logs
