"""The script of a first hour: its rows, how it finds commands, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_hour.commands import CommandNotPrinted, fill_in, find_command
from tests.first_hour.page import Result, clean, render_page
from tests.first_hour.steps import STEPS, Step
from tests.first_hour.terminal import Outcome, find_failure
from tests.repository import ROOT

PAGE = """\
Give `kiln run MODEL "PROMPT"`, or in Python:

```python
import kiln

print("hello")
```
"""


def make_step(command: str = 'kiln run MODEL "PROMPT"', *, page: str = "page.md", **fields: object) -> Step:
    return Step(**{"user": "a user", "page": page, "command": command, "expects": "done"} | fields)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.command[:40])
def test_every_command_stands_in_its_page(step: Step) -> None:
    printed = find_command(step, ROOT)
    assert all(name in printed for name in step.values), "every value stands for something"


def test_a_command_that_a_page_no_longer_prints_is_named(root: Path) -> None:
    with pytest.raises(CommandNotPrinted, match=r"page\.md does not print 'kiln walk'"):
        find_command(make_step("kiln walk"), root)
    with pytest.raises(CommandNotPrinted):
        find_command(make_step("Give"), root), "prose is no command"


def test_a_user_writes_values_for_names(root: Path) -> None:
    step = make_step(values={"MODEL": "./tiny", "PROMPT": "Hi"}, more="--yes")
    assert fill_in(step, find_command(step, root)) == 'kiln run ./tiny "Hi" --yes'


def test_python_is_run_by_the_block(root: Path) -> None:
    step = make_step("import kiln", language="python")
    printed = find_command(step, root)
    assert printed == 'import kiln\n\nprint("hello")'
    assert fill_in(step, printed).startswith("python -c 'import kiln\n")


@pytest.mark.parametrize(
    ("code", "seconds", "output", "failure"),
    [
        (0, 1.0, "all done", ""),
        (2, 1.0, "all done", "it ended with code 2"),
        (0, 1.0, "nothing", "its output has nothing like 'done'"),
        (0, 5.0, "done", "it took 5 s, and may take 3 s"),
        (None, 1.0, "", "it did not end in time"),
    ],
)
def test_a_step_fails_for_a_reason(code: int | None, seconds: float, output: str, failure: str) -> None:
    assert find_failure(make_step(limit_s=3.0), code, seconds, output) == failure


def test_the_page_names_what_failed_and_what_was_not_run() -> None:
    results = [
        Result(make_step(limit_s=3.0), "kiln run", Outcome(2.0, "done")),
        Result(make_step(), "kiln stop", Outcome(1.0, "oh", "it ended with code 1")),
        Result(make_step(user="another"), "kiln fly", None, "too high"),
    ]
    assert [result.has_failed for result in results] == [False, True, False]
    page = render_page(results, commit="c0ffee", host="a host", places={})
    assert "Commit c0ffee, on a host: 2 of 3 steps were run, **1 failed**." in page
    assert "| a user | `kiln run` | 2.0 | 3 | done |" in page
    assert "|  | `kiln stop` | 1.0 |  | **failed**: it ended with code 1 |" in page
    assert "What `kiln stop` wrote:\n\n```text\noh\n```" in page
    assert "| another | `kiln fly` |  |  | not run: too high |" in page
    assert "```text\ndone" not in page, "what went well is not shown"


def test_outputs_are_bounded_and_tell_nothing_of_the_host() -> None:
    places = {"/secret": "/tmp", "/secret/clone": "~/kiln"}
    output = "\x1b[1mstart\x1b[0m\n/secret/clone/x\n 10%\r 100%\nLooking at https://mirror.example.net/simple/x\n"
    assert clean(output, places) == "start\n~/kiln/x\n 100%\nLooking at https://…/simple/x"
    assert clean("https://github.com/x http://127.0.0.1:1/", {}) == "https://github.com/x http://127.0.0.1:1/"
    lines = clean("\n".join(f"line {number} {'x' * 200}" for number in range(50)), {}).splitlines()
    assert lines[0] == "…"
    assert lines[-1].startswith("line 49 ")
    assert len(lines) == 15
    assert max(map(len, lines)) == 160
