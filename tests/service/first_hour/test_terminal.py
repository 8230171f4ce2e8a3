"""The terminal of the first hour's users, with commands that take no time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.first_hour.steps import Step
from tests.first_hour.terminal import Outcome, Terminal


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("KILN_RUNTIME", "of another Kiln")
    (tmp_path / "clone/folder").mkdir(parents=True)
    with Terminal(tmp_path / "clone", tmp_path / "data") as terminal:
        yield terminal


def give(terminal: Terminal, command: str, expects: str = "", **fields: Any) -> Outcome:
    return terminal.give(Step(user="a user", page="page.md", command=command, expects=expects, **fields), command)


def test_a_command_has_what_an_earlier_one_exported_and_nothing_of_another_kiln(terminal: Terminal) -> None:
    assert give(terminal, "export GREETING=hello").failure == ""
    outcome = give(terminal, 'echo "$GREETING ${KILN_RUNTIME:-none}"', "hello none")
    assert (outcome.failure, outcome.output) == ("", "hello none\n")


def test_a_command_is_given_in_a_folder_and_reads_what_is_typed(terminal: Terminal) -> None:
    assert give(terminal, "pwd; cat", "folder\nhello", folder="folder", typed="hello").failure == ""


def test_a_command_that_fails_says_how(terminal: Terminal) -> None:
    assert give(terminal, "echo oh; (exit 3)").failure == "it ended with code 3"
    assert terminal.has("true")
    assert not terminal.has("false")


def test_a_command_stays_until_its_user_leaves(terminal: Terminal) -> None:
    with terminal:
        outcome = give(terminal, "echo ready $$; sleep 600", "ready", stays=True)
        assert outcome.failure == ""
        process = psutil.Process(int(outcome.output.split()[1]))
        assert process.is_running()
        assert give(terminal, "exit 1", "ready", stays=True).failure == "it ended with code 1"
    assert not process.is_running()
