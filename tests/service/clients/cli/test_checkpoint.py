"""`--model` means the same in every current directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]
Send = Callable[..., tuple[Outcome, list[str]]]
MISSING = refusal("NOT_FOUND", "CHECKPOINT_NOT_FOUND")
COMMANDS = {
    "Compile": ("compile", "config.yaml", "--name", "tiny"),
    "PlanCompile": ("plan", "config.yaml"),
    "ShardWeights": ("shard-weights", "tiny:v3", "--name", "tiny"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which has a checkpoint `models/tiny`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("{}")
    return tmp_path


@pytest.fixture(params=COMMANDS)
def send(request: pytest.FixtureRequest, server: ScriptedServer, kiln: Kiln) -> Send:
    """Runs a command with a model; gives its outcome and the models that the compiler was asked for."""
    method = request.param
    answer = samples.plan() if method == "PlanCompile" else samples.OPERATION
    server.script("WatchCompile", [samples.watch_result()])

    def run(model: object, *refusals: object) -> tuple[Outcome, list[str]]:
        server.script(method, *refusals, answer)
        outcome = kiln(*COMMANDS[method], "--model", model, "--json")
        return outcome, [asked.model for asked in server.requests[method]]

    return run


def test_a_name_of_the_compiler_is_sent_as_it_is(send: Send, folder: Path) -> None:
    """Also if the current directory has a directory of that name."""
    outcome, asked = send("models/tiny")
    assert (outcome.exit_code, asked) == (0, ["models/tiny"])


@pytest.mark.parametrize("model", ["./models/tiny", "{}/models/tiny"])
def test_a_path_is_made_absolute(send: Send, folder: Path, model: str) -> None:
    _, asked = send(model.format(folder))
    assert asked == [str(folder / "models/tiny")]


def test_a_directory_of_this_host_is_the_second_choice(send: Send, folder: Path) -> None:
    outcome, asked = send("models/tiny", MISSING)
    assert (outcome.exit_code, asked) == (0, ["models/tiny", str(folder / "models/tiny")])


def test_the_compiler_may_not_read_the_directory(send: Send) -> None:
    outcome, _ = send("models/tiny", MISSING, refusal("PERMISSION_DENIED", "PATH_OUTSIDE_MODEL_ROOTS"))
    assert outcome.error["reason"] == "PATH_OUTSIDE_MODEL_ROOTS"


@pytest.mark.parametrize("model", ["kiln-tiny", "./models/tiny"])
def test_what_is_nowhere_is_asked_for_once(send: Send, model: str) -> None:
    outcome, asked = send(model, MISSING)
    assert (outcome.error["reason"], len(asked)) == ("CHECKPOINT_NOT_FOUND", 1)
