"""What holds for every command: help, usage errors, connections, colours, interrupts."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from google.protobuf.empty_pb2 import Empty
from kiln.runtime.v1 import runtime_pb2
from kiln_client import AsyncRuntime, __version__
from kiln_client.cli.main import kiln as kiln_command

from tests.hang_guard import HANG_S
from tests.repository import ROOT
from tests.servers import responses as samples
from tests.servers.command import KILN, python_environment
from tests.servers.scripted_server import HANG, ScriptedServer
from tests.service.clients.cli.remote_commands import CALLS
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]


def commands(group: click.Group = kiln_command, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        else:
            yield (*names, name)


COMMANDS = list(commands())


def test_the_commands_of_the_contract_are_there() -> None:
    assert {" ".join(words) for words in COMMANDS} == {
        "run",
        "serve",
        "pull",
        "ps",
        "logs",
        "down",
        "up",
        "doctor",
        "token",
        "compile",
        "plan",
        "shard-weights",
        "bundles list",
        "bundles show",
        "bundles read",
        "bundles alias",
        "bundles give",
        "bundles delete",
        "bundles lease",
        "bundles release",
        "bundles leases",
        "bundles gc",
        "bundles import",
        "config show",
        "config export",
        "load",
        "unload",
        "status",
        "generate",
        "load-weights",
        "reset-kv",
        "sessions",
        "tokenize",
        "operations list",
        "operations cancel",
        "operations wait",
        "version",
    }


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_documented(words: tuple[str, ...]) -> None:
    assert f"`kiln {' '.join(words)}" in (ROOT / "docs/clients.md").read_text()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(kiln: Kiln, words: tuple[str, ...]) -> None:
    outcome = kiln(*words, "--help")
    assert outcome.exit_code == 0
    assert "--json" in outcome.out
    assert outcome.err == ""


CONNECTION_OPTIONS = [
    *("--compiler", "--runtime", "--tls", "--tls-ca", "--tls-cert", "--tls-key"),
    *("--token-file", "--allow-plaintext-token"),
]


def test_help_describes_connection_options_once(kiln: Kiln) -> None:
    described = [line.split()[0] for line in kiln("--help").out.splitlines() if line.startswith("  --")]
    assert described == [*CONNECTION_OPTIONS, "--json"]


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_help_of_a_command_points_to_the_connection_options(kiln: Kiln, words: tuple[str, ...]) -> None:
    lines = [line.split() for line in kiln(*words, "--help").out.splitlines() if line.startswith("  -")]
    assert [words[0] for words in lines if words[0].rstrip(",") in CONNECTION_OPTIONS] == ["--compiler,"]
    assert any(words[-3:] == ["see", "`kiln", "--help`."] for words in lines)


@pytest.mark.parametrize(
    ("words", "suggestion"), [(("lod",), "'load'"), (("bundles", "shw"), "'show'"), (("load", "--core"), "'--cores'")]
)
def test_an_unknown_name_is_told_with_the_nearest(kiln: Kiln, words: tuple[str, ...], suggestion: str) -> None:
    outcome = kiln(*words)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "Did you mean" in outcome.err
    assert suggestion in outcome.err
    assert suggestion in kiln(*words, "--json").error["message"]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_reports_usage_errors_as_json(kiln: Kiln, words: tuple[str, ...]) -> None:
    outcome = kiln(*words, "--json", "--nonsense")
    assert outcome.exit_code == 2
    assert len(outcome.lines) == 1
    assert (outcome.error["code"], outcome.error["reason"]) == ("INVALID_ARGUMENT", "USAGE_INVALID")
    assert "--nonsense" in outcome.error["message"]
    assert outcome.err == ""


def test_every_remote_command_is_called_below() -> None:
    local = ("run", "serve", "pull", "ps", "logs", "down", "up", "doctor", "token", "version")
    assert {*CALLS, *((name,) for name in local)} == set(COMMANDS)


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_every_command_reports_its_servers_errors_as_json(kiln: Kiln, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    arguments = [str(tmp_path / "config.yaml") if word == "-" else word for word in CALLS[words]]
    outcome = kiln(*words, *arguments, "--json")  # the server has no script
    assert outcome.exit_code == 1
    assert (outcome.error["code"], outcome.error["reason"]) == ("UNIMPLEMENTED", "NOT_SCRIPTED")
    person = kiln(*words, *arguments)
    assert (person.exit_code, person.out) == (1, "")
    assert person.err.startswith("error: UNIMPLEMENTED/NOT_SCRIPTED\n")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("load", "--json", "tiny"), "--deployment"),
        (("load", "--json"), "ref"),
        (("unload", "d", "--in-flight", "later", "--json"), "--in-flight"),
        (("compile", "missing.yaml", "--model", "m", "--name", "n", "--json"), "config"),
        (("up", "--cores", "0", "--json"), "--cores"),
    ],
)
def test_usage_errors_name_the_option(kiln: Kiln, words: tuple[str, ...], field: str) -> None:
    outcome = kiln(*words)
    assert outcome.exit_code == 2
    assert [violation["field"] for violation in outcome.error["fields"]] == [field]


def test_usage_errors_for_a_person(kiln: Kiln) -> None:
    outcome = kiln("load", "tiny")
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "Usage: kiln load" in outcome.err
    assert "--deployment" in outcome.err


def test_no_command_shows_help(kiln: Kiln) -> None:
    outcome = kiln()
    assert outcome.exit_code == 2
    assert "generate" in outcome.err


def test_text_that_is_no_utf8(kiln: Kiln) -> None:
    outcome = kiln("generate", "--deployment", "d", "--prompt", "\udcff", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (2, "USAGE_INVALID")


def test_version(kiln: Kiln) -> None:
    assert kiln("version").out == f"kiln {__version__}\n"
    assert kiln("version", "--json").last["version"] == __version__


def test_addresses_stand_before_or_behind_the_command(
    server: ScriptedServer, kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse())
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse())
    monkeypatch.setenv("KILN_RUNTIME", "127.0.0.1:1")
    assert kiln("status", "--runtime", server.address, "--json").exit_code == 0
    assert kiln("--json", "--runtime", server.address, "status").last["deployments"] == []
    assert kiln("--runtime", "127.0.0.1:1", "status", "--runtime", server.address).exit_code == 0
    assert kiln("status", "--json").error["reason"] == "CONNECTION_FAILED"


def test_address_that_is_none(kiln: Kiln) -> None:
    outcome = kiln("status", "--runtime", "localhost", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "ADDRESS_INVALID")


def test_tls_options_turn_tls_on(kiln: Kiln) -> None:
    """The scripted server talks plaintext, so a handshake fails, although a plaintext call would be answered."""
    assert kiln("status", "--json").error["reason"] == "NOT_SCRIPTED"
    assert kiln("status", "--tls", "--json").error["reason"] == "CONNECTION_FAILED"


def test_unreadable_file(kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ca.pem"
    path.touch()

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    outcome = kiln("status", "--tls-ca", path, "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "FILE_UNUSABLE")
    assert str(path) in outcome.error["message"]


def test_a_bug_is_an_error_object_and_a_traceback(
    kiln: Kiln, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(AsyncRuntime, "get_deployment", fail)
    with pytest.raises(ZeroDivisionError):
        kiln("status", "demo", "--json")
    error = json.loads(capfd.readouterr().out)["error"]
    assert (error["code"], error["reason"]) == ("INTERNAL", "CLIENT_FAILED")


def start(server: ScriptedServer, *words: str) -> subprocess.Popen[str]:
    environment = python_environment(KILN_RUNTIME=server.address, KILN_COMPILER=server.address)
    pipe = subprocess.PIPE
    return subprocess.Popen([*KILN, *words], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_events_are_flushed_and_interrupt_ends_the_request(server: ScriptedServer) -> None:
    server.script("Generate", [samples.accepted(), samples.delta(1, "Once", 11), HANG])
    with start(server, "generate", "--deployment", "demo", "--prompt", "x", "--json") as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]  # while the stream goes on
        assert [line["event"] for line in lines] == ["accepted", "delta"]
        process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    error = json.loads(rest)["error"]
    assert (error["code"], error["reason"]) == ("CANCELLED", "INTERRUPTED")
    assert complaint.strip() == ""
    assert server.cancelled["Generate"].wait(HANG_S)


def test_text_is_flushed_and_interrupt_is_no_traceback(server: ScriptedServer) -> None:
    server.script("Generate", [samples.accepted(), samples.delta(1, "Once", 11), HANG])
    with start(server, "generate", "--deployment", "demo", "--prompt", "x") as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "Once"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert complaint.split() == ["error:", "CANCELLED/INTERRUPTED", "the", "command", "was", "interrupted"]


def test_a_server_that_goes_is_one_error() -> None:
    server = ScriptedServer()
    server.script("Generate", [samples.accepted(), samples.delta(1, "Once", 11), HANG])
    with start(server, "generate", "--deployment", "demo", "--prompt", "x") as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "Once"
        server.stop()
        _, complaint = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    lines = complaint.strip().splitlines()
    assert lines[0] == "error: UNAVAILABLE/CONNECTION_FAILED"
    assert len(lines) == 2


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_a_compile_cancels_it(server: ScriptedServer, number: int, exit_code: int) -> None:
    server.script("Compile", samples.OPERATION)
    server.script("WatchCompile", [samples.watch_progress("LOWER"), HANG])
    server.script("CancelOperation", Empty())
    with start(server, "compile", "-", "--model", "m", "--name", "tiny", "--json") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("neuron_config: {}\n")
        process.stdin.close()
        assert json.loads(process.stdout.readline())["event"] == "started"
        assert json.loads(process.stdout.readline())["event"] == "progress"
        process.send_signal(number)
        last = json.loads(process.stdout.read())
        assert process.wait(HANG_S) == exit_code
    assert last["error"]["reason"] == "INTERRUPTED"
    assert [request.name for request in server.requests["CancelOperation"]] == ["operations/7"]


def test_a_reader_that_goes_ends_the_request_quietly(server: ScriptedServer) -> None:
    deltas = [samples.delta(number, "x" * 4096, number) for number in range(1, 2000)]
    server.script("Generate", [samples.accepted(), *deltas, HANG])
    with start(server, "generate", "--deployment", "demo", "--prompt", "x") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(HANG_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_full_disk_is_named(server: ScriptedServer) -> None:
    server.script("Generate", [samples.accepted(), samples.delta(1, "Once", 11), samples.finished(2)])
    environment = python_environment(KILN_RUNTIME=server.address)
    words = [*KILN, "generate", "--deployment", "demo", "--prompt", "x"]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(words, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "error: FAILED_PRECONDITION/FILE_UNUSABLE",
        "  standard output: No space left on device",
    ]


def run_on_terminal(server: ScriptedServer, *words: str, **variables: str) -> str:
    """Runs a command with a pseudo-terminal as its standard output and error; gives what it showed."""
    main, terminal = pty.openpty()
    environment = python_environment(KILN_RUNTIME=server.address, KILN_COMPILER=server.address, **variables)
    with subprocess.Popen([*KILN, *words], env=environment, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while select.select([main], [], [], HANG_S)[0]:
            try:
                shown += os.read(main, 65536)
            except OSError:  # the last descriptor of the terminal is closed
                break
        process.wait(HANG_S)
    os.close(main)
    return shown.decode()


def test_colours_and_bars_are_for_terminals(server: ScriptedServer) -> None:
    progress = [
        runtime_pb2.LoadBundleResponse(progress=samples.load_progress("VERIFY", 1_000_000, 4_000_000)),
        runtime_pb2.LoadBundleResponse(deployment=samples.deployment()),
    ]
    server.script("LoadBundle", progress)
    words = ("load", "tiny", "--deployment", "demo")
    shown = run_on_terminal(server, *words, TERM="xterm-256color")
    assert "━" in shown
    assert "1.0 MB/4.0 MB" in shown
    assert "\x1b[2m" in shown  # a dimmed name
    assert "\x1b" not in run_on_terminal(server, *words, "--json", TERM="xterm-256color")
    error = run_on_terminal(server, "status", TERM="xterm-256color")
    assert "\x1b[1;31merror" in error
    assert "\x1b[1;31m" not in run_on_terminal(server, "status", TERM="xterm-256color", NO_COLOR="1")
