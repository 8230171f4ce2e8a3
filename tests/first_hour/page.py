"""Writes the page of a first hour: who did what, how long it took, and what came out if it was not what it should."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.first_hour.commands import fill_in
from tests.first_hour.steps import Step
from tests.first_hour.terminal import Outcome

MAX_LINES = 14
MAX_COLUMNS = 160

_INTRODUCTION = """\
# The first hour

`make first-hour` writes this page. It acts as six kinds of new users on a fresh clone: it takes each command from the
page that prints it, with the user's own values for the names in capitals, and compares output and seconds with what the
step expects. A step that the host lacks something for is not run.
"""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_URL = re.compile(r"(https?://)(?!127\.0\.0\.1|localhost|github\.com)[^/\s'\"]+")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a step.

    Attributes:
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
    """The page of the steps, in their order; `places` are this host's directories and the words that stand for them."""
    failed = sum(result.has_failed for result in results)
    run = sum(result.outcome is not None for result in results)
    verdict = "all did what they should" if not failed else f"**{failed} failed**"
    parts = [
        _INTRODUCTION,
        f"Commit {commit}, on {host}: {run} of {len(results)} steps were run, {verdict}.\n",
        _render_table(results),
    ]
    parts.extend(_render_failure(result, places) for result in results if result.has_failed)
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
    lines = ["| user | command | seconds | limit | |", "|---|---|---|---|---|"]
    for user, steps in groupby(results, key=lambda result: result.step.user):
        for number, result in enumerate(steps):
            limit = "" if result.step.limit_s is None else f"{result.step.limit_s:.0f}"
            cells = ("" if number else user, f"`{_name(result)}`", _seconds(result), limit, _state(result))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _render_failure(result: Result, places: Mapping[str, str]) -> str:
    assert result.outcome is not None
    return f"What `{_name(result)}` wrote:\n\n```text\n{clean(result.outcome.output, places)}\n```\n"


def _name(result: Result) -> str:
    """The first line of a command."""
    if result.step.language == "python":
        return result.printed.splitlines()[0] + " …"
    return fill_in(result.step, result.printed).splitlines()[0].replace("|", "\\|").rstrip(" \\")


def _seconds(result: Result) -> str:
    return "" if result.outcome is None else f"{result.outcome.seconds:.1f}"


def _state(result: Result) -> str:
    if result.outcome is None:
        return f"not run: {result.reason}"
    return f"**failed**: {result.outcome.failure}" if result.outcome.failure else "done"
