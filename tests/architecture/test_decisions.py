"""Each file of docs/decisions has the form that its README states, and only decisions that exist are named."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.repository import ROOT

FOLDER = ROOT / "docs/decisions"
FILES = sorted(FOLDER.glob("[0-9][0-9][0-9][0-9]-*.md"))
NUMBERS = [int(path.name[:4]) for path in FILES]

FORM = re.compile(
    r"# (?P<number>\d{4})\. \S.*\n\n"
    r"20\d\d-\d\d-\d\d(?: · absorbs (?P<absorbed>\d+(?:, \d+)*))?\n\n"
    r"(?:[^#\n].*\n+)+"
    r"## Rejected\n\n"
    r"(?:- .*\n(?:  .*\n)*)+"
)
MAX_WORDS = 230


def absorbed_by(text: str) -> list[int]:
    """Numbers of the decisions that a decision stands for beside its own."""
    match = FORM.fullmatch(text)
    return [int(number) for number in re.findall(r"\d+", (match and match["absorbed"]) or "")]


def test_each_number_is_one_decision() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"README.md", *(path.name for path in FILES)}
    taken = NUMBERS + [number for path in FILES for number in absorbed_by(path.read_text())]
    assert sorted(taken) == sorted(set(taken))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name[:4])
def test_decision_has_title_date_text_and_what_was_rejected(path: Path) -> None:
    text = path.read_text()
    match = FORM.fullmatch(text)
    assert match, "a decision has a title, a date with what it absorbs, text, and a list below `## Rejected`"
    assert match["number"] == path.name[:4]
    assert len(text.split()) <= MAX_WORDS


def test_named_decisions_exist() -> None:
    pattern = "--extended-regexp", "-e", r"[Dd]ecision \[?[0-9]+"
    listed = subprocess.run(
        ["git", "grep", "--only-matching", "-h", *pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    named = {int(re.findall(r"\d+", line)[0]) for line in listed.stdout.splitlines()}
    assert named, "source and pages refer to decisions by number"
    assert named <= set(NUMBERS)
