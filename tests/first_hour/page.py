"""Writes the page of a first hour: who did what, how long it took, what came out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from os.path import relpath

from tests.first_hour.commands import fill_in
from tests.first_hour.steps import LARGE_RUN_S, LATER_RUN_S, SHIPPED_RUN_S, SMALL_RUN_S, Step
from tests.first_hour.terminal import Outcome

MAX_LINES = 14
MAX_COLUMNS = 160

_INTRODUCTION = f"""\
# The first hour

`make first-hour` writes this page. It acts as five kinds of new users on a fresh clone. It takes each command from the
page that prints it, and ends if the page no longer does. It gives the command as it stands, with the user's own values
for the names in capitals, and compares what comes out with what the step expects, and the time with its limit if there
is one: installation aside, {SHIPPED_RUN_S:.0f} s for the first `kiln run` of the shipped model, {SMALL_RUN_S:.0f} s
for one of 162 M parameters, {LARGE_RUN_S:.0f} s for one of 1.1 B, {LATER_RUN_S:.0f} s for the next run of each. The
programs of `.venv` are found as if the user had activated it. Outputs are cut to their last lines. A step that the host
lacks something for is not run.
"""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_URL = re.compile(r"(https?://)(?!127\.0\.0\.1|localhost|github\.com)[^/\s'\"]+")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a step.

    Attributes:
        step: The step.
        printed: The command as its page prints it.
        outcome: How the command ended; None if it was not run.
        reason: Why it was not run.
    """

    step: Step
    printed: str
    outcome: Outcome | None
    reason: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the command did not do what the step expects."""
        return self.outcome is not None and bool(self.outcome.failure)


def render_page(results: Sequence[Result], *, commit: str, host: str, places: Mapping[str, str]) -> str:
    """Writes the page.

    Args:
        results: What became of the steps, in their order.
        commit: The commit that was cloned.
        host: The host, in a few words.
        places: Directories of this host and the words that stand for them.
    """
    failed = sum(result.has_failed for result in results)
    run = sum(result.outcome is not None for result in results)
    verdict = "all did what they should" if not failed else f"**{failed} failed**"
    parts = [
        _INTRODUCTION,
        f"Commit {commit}, on {host}: {run} of {len(results)} steps were run, {verdict}.\n",
        _render_table(results),
    ]
    for user, steps in groupby(results, key=lambda result: result.step.user):
        parts.append(f"## {user[0].upper()}{user[1:]}\n")
        parts.extend(_render_step(result, places) for result in steps)
    return "\n".join(parts)


def clean(output: str, places: Mapping[str, str]) -> str:
    """Cuts an output to its last lines, without this host's directories, hosts of packages, and control characters."""
    text = _ESCAPE.sub("", output).replace("```", "'''")
    for place, words in sorted(places.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(place, words)
    # A bar writes over its line: what a person sees in the end is behind the last return.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in _URL.sub(r"\1…", text).split("\n")]
    shown = [line if len(line) <= MAX_COLUMNS else f"{line[: MAX_COLUMNS - 1]}…" for line in lines if line]
    cut = ["…"] if len(shown) > MAX_LINES else []
    return "\n".join(cut + shown[-MAX_LINES:])


def _render_table(results: Iterable[Result]) -> str:
    lines = ["| user | command | seconds | |", "|---|---|---|---|"]
    for result in results:
        first = fill_in(result.step, result.printed).splitlines()[0].replace("|", "\\|")
        name = result.printed.splitlines()[0] + " …" if result.step.language == "python" else first.rstrip(" \\")
        lines.append(f"| {result.step.user} | `{name}` | {_seconds(result)} | {_state(result)} |")
    return "\n".join([*lines, ""])


def _render_step(result: Result, places: Mapping[str, str]) -> str:
    is_python = result.step.language == "python"
    command = result.printed if is_python else fill_in(result.step, result.printed)
    seconds = f", {_seconds(result)} s" if result.outcome is not None else ""
    where = "" if result.step.folder == "." else f", in `{result.step.folder}`"
    parts = [
        f"From [{result.step.page}]({relpath(result.step.page, 'docs')}){where}: {_state(result)}{seconds}\n",
        f"```{'python' if is_python else 'sh'}\n{command}\n```\n",
    ]
    if result.outcome is not None:
        output = clean(result.outcome.output, places)
        parts.append(f"```text\n{output}\n```\n" if output else "It wrote nothing.\n")
    return "\n".join(parts)


def _seconds(result: Result) -> str:
    return "" if result.outcome is None else f"{result.outcome.seconds:.1f}"


def _state(result: Result) -> str:
    if result.outcome is None:
        return f"not run: {result.reason}"
    return f"**failed**: {result.outcome.failure}" if result.outcome.failure else "done"
