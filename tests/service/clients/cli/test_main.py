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
from kiln.runtime.v1 import runtime_pb2
from kiln.runtime.v1.generation_pb2 import ToolChoice
from kiln_client import AsyncRuntime, __version__
from kiln_client.cli.main import kiln as kiln_command

from tests.hang_guard import HANG_S
from tests.repository import ROOT
from tests.servers import responses as samples
from tests.servers.command import KILN, python_environment
from tests.servers.scripted_server import HANG, ScriptedServer
from tests.service.clients.cli.remote_commands import CALLS
from tests.service.clients.conftest import Kiln


def commands(group: click.Group = kiln_command, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        else:
            yield (*names, name)


COMMANDS = list(commands())


def test_the_commands_of_the_contract_are_there() -> None:
    """Those that call a service are called below."""
    local = ["run", "serve", "pull", "ps", "logs", "down", "up", "doctor", "token", "errors", "version"]
    assert {*CALLS, ("config", "reference"), *((name,) for name in local)} == set(COMMANDS)


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/clients.md").read_text()
    assert [words for words in COMMANDS if f"`kiln {' '.join(words)}" not in page] == []


def test_every_command_has_help_and_json(kiln: Kiln) -> None:
    helps = {words: kiln(*words, "--help") for words in COMMANDS}
    assert [words for words, one in helps.items() if one.exit_code or one.err or "--json" not in one.out] == []


def test_every_command_reports_usage_errors_as_json(kiln: Kiln) -> None:
    for words in COMMANDS:
        outcome = kiln(*words, "--json", "--nonsense")
        assert (outcome.exit_code, outcome.err, len(outcome.lines)) == (2, "", 1), words
        assert (outcome.error["code"], outcome.error["reason"]) == ("INVALID_ARGUMENT", "USAGE_INVALID")
        assert "--nonsense" in outcome.error["message"]


CONNECTION_OPTIONS = [
    *("--compiler", "--runtime", "--tls", "--tls-ca", "--tls-cert", "--tls-key"),
    *("--token-file", "--allow-plaintext-token"),
]


def test_help_describes_connection_options_once(kiln: Kiln) -> None:
    described = [line.split()[0] for line in kiln("--help").out.splitlines() if line.startswith("  --")]
    assert described == [*CONNECTION_OPTIONS, "--json", "--version"]


def test_help_of_a_command_points_to_the_connection_options(kiln: Kiln) -> None:
    for words in CALLS:
        lines = [line.split() for line in kiln(*words, "--help").out.splitlines() if line.startswith("  -")]
        assert [line[0] for line in lines if line[0].rstrip(",") in CONNECTION_OPTIONS] == ["--compiler,"], words
        assert any(line[-3:] == ["see", "`kiln", "--help`."] for line in lines), words


@pytest.mark.parametrize(
    ("words", "suggestion"), [(("lod",), "'load'"), (("bundles", "shw"), "'show'"), (("load", "--core"), "'--cores'")]
)
def test_an_unknown_name_is_told_with_the_nearest(kiln: Kiln, words: tuple[str, ...], suggestion: str) -> None:
    outcome = kiln(*words)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "Did you mean" in outcome.err
    assert suggestion in outcome.err
    assert suggestion in kiln(*words, "--json").error["message"]


def test_every_command_sends_its_token_and_reports_its_servers_errors(
    server: ScriptedServer, kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has no script."""
    monkeypatch.delenv("KILN_TOKEN", raising=False)
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "token").write_text("t0\n")
    for words, given in CALLS.items():
        server.metadata.clear()
        arguments = [str(tmp_path / "config.yaml") if word == "-" else word for word in given]
        outcome = kiln(*words, *arguments, "--token-file", tmp_path / "token", "--json")
        assert (outcome.exit_code, outcome.error["code"]) == (1, "UNIMPLEMENTED"), words
        assert outcome.error["reason"] == "NOT_SCRIPTED"
        person = kiln(*words, *arguments, "--token-file", tmp_path / "token")
        assert (person.exit_code, person.out) == (1, "")
        assert person.err.startswith("error: UNIMPLEMENTED/NOT_SCRIPTED\n")
        sent = {metadata.get("authorization") for calls in server.metadata.values() for metadata in calls}
        assert sent == {"Bearer t0"}, words


def test_a_constraint_is_sent(server: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    for words in (
        ("--json-schema", tmp_path / "schema.json"),
        ("--regex", "a+"),
        ("--choice", "yes", "--choice", "no"),
        (),
    ):
        server.script("Generate", samples.generation())
        assert kiln("generate", "--deployment", "demo", "--prompt", "x", *words).exit_code == 0
    schema, regex, choices, none = [request.constraint for request in server.requests["Generate"]]
    assert (schema.json_schema, regex.regex, list(choices.choices.texts)) == ('{"type": "null"}', "a+", ["yes", "no"])
    assert none.WhichOneof("constraint") is None


def test_a_constraint_that_cannot_be_one_is_refused(kiln: Kiln, tmp_path: Path) -> None:
    schema, latin, broken = (tmp_path / name for name in ("schema.json", "latin.json", "broken.json"))
    schema.write_text("{}")
    latin.write_bytes('{"title": "é"}'.encode("latin-1"))
    broken.write_text("{")
    for words, reason in (
        (("--json-schema", latin), f"Invalid value for '--json-schema': {latin} is no JSON in UTF-8"),
        (("--json-schema", broken), f"Invalid value for '--json-schema': {broken} is no JSON in UTF-8"),
        (("--json-schema", schema, "--regex", "a+"), "got --json-schema and --regex; accepted: one constraint"),
        (("--choice", "yes", "--regex", "a+"), "got --choice and --regex; accepted: one constraint"),
    ):
        outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", *words)
        assert outcome.exit_code == 2
        assert reason in " ".join(outcome.err.split())


def test_a_choice_of_tools_is_sent(server: ScriptedServer, kiln: Kiln) -> None:
    for words in (("--tool-choice", "required"), ("--tool-choice", "find"), ()):
        server.script("Generate", samples.generation())
        assert kiln("generate", "--deployment", "demo", "--prompt", "x", *words).exit_code == 0
    required, named, none = server.requests["Generate"]
    assert (required.tool_choice.mode, named.tool_choice.function) == (ToolChoice.MODE_REQUIRED, "find")
    assert not none.HasField("tool_choice")


def test_a_timeout_is_the_deadline(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("Generate", samples.generation())
    assert kiln("generate", "--deployment", "demo", "--prompt", "x", "--timeout", "12.5").exit_code == 0
    (remaining,) = server.time_limits_s["Generate"]
    assert 10 < (remaining or 0) < 13  # gRPC rounds it up on the wire


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("load", "--json", "tiny"), "--deployment"),
        (("load", "--json"), "ref"),
        (("unload", "d", "--in-flight", "later", "--json"), "--in-flight"),
        (("compile", "missing.yaml", "--model", "m", "--name", "n", "--json"), "config"),
        (("up", "--cores", "0", "--json"), "--cores"),
        *(
            (("plan", __file__, "--model", "m", "--core-memory", size, "--json"), "--core-memory")
            for size in ("16GB", "-1", "x", "9" * 30, "8388608TiB")
        ),
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
    assert kiln("--version").out == f"kiln {__version__}\n"
    for words in (["version", "--json"], ["--version", "--json"], ["--json", "--version"]):
        assert kiln(*words).last["version"] == __version__


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


def test_a_token_does_not_leave_this_host_in_plaintext(kiln: Kiln, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0")
    words = ("status", "--runtime", "kiln.invalid:443", "--token-file", tmp_path / "token", "--json")
    assert kiln(*words).error["reason"] == "TOKEN_IN_PLAINTEXT"
    assert kiln(*words, "--allow-plaintext-token").error["reason"] == "CONNECTION_FAILED"


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


GENERATE = ("generate", "--deployment", "demo", "--prompt", "x")
BEGUN = [samples.accepted(), samples.delta(1, "Once", 11)]


def test_events_are_flushed_and_interrupt_ends_the_request(server: ScriptedServer) -> None:
    server.script("Generate", [*BEGUN, HANG])
    with start(server, *GENERATE, "--json") as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]  # while the stream goes on
        assert [line["event"] for line in lines] == ["accepted", "delta"]
        process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=HANG_S)
    error = json.loads(rest)["error"]
    assert (process.returncode, error["code"], error["reason"]) == (130, "CANCELLED", "INTERRUPTED")
    assert complaint.strip() == ""
    assert server.cancelled["Generate"].wait(HANG_S)


@pytest.mark.parametrize(
    ("end", "exit_code", "error"),
    [
        (lambda _, process: process.send_signal(signal.SIGINT), 130, "CANCELLED/INTERRUPTED"),
        (lambda server, _: server.stop(), 1, "UNAVAILABLE/CONNECTION_FAILED"),
    ],
    ids=["interrupt", "server that goes"],
)
def test_text_is_flushed_and_its_end_is_one_error(
    server: ScriptedServer, end: Callable[..., None], exit_code: int, error: str
) -> None:
    server.script("Generate", [*BEGUN, HANG])
    with start(server, *GENERATE) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "Once"
        end(server, process)
        _, complaint = process.communicate(timeout=HANG_S)
    lines = complaint.strip().splitlines()
    assert (process.returncode, lines[0], len(lines)) == (exit_code, f"error: {error}", 2)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_a_compile_cancels_it(compiling: ScriptedServer, number: int, exit_code: int) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("LOWER"), HANG])
    with start(compiling, "compile", "-", "--model", "m", "--name", "tiny", "--json") as process:
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
    assert [request.config_json for request in compiling.requests["Compile"]] == ['{"neuron_config": {}}']
    assert [request.name for request in compiling.requests["CancelOperation"]] == ["operations/7"]


def test_a_reader_that_goes_ends_the_request_quietly(server: ScriptedServer) -> None:
    deltas = [samples.delta(number, "x" * 4096, number) for number in range(1, 2000)]
    server.script("Generate", [samples.accepted(), *deltas, HANG])
    with start(server, *GENERATE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(HANG_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_full_disk_is_named(server: ScriptedServer) -> None:
    server.script("Generate", [*BEGUN, samples.finished(2)])
    environment, words = python_environment(KILN_RUNTIME=server.address), [*KILN, *GENERATE]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(words, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: FAILED_PRECONDITION/FILE_UNUSABLE\n  standard output: No space left on device\n"


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
