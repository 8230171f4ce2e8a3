"""The index of docs/decisions agrees with its files, and code and pages name only decisions that exist."""

import re
import subprocess

import pytest

from tests.repository import ROOT

FOLDER = ROOT / "docs/decisions"
FILES = {int(path.name[:4]): path for path in sorted(FOLDER.glob("[0-9][0-9][0-9][0-9]-*.md"))}

STATUS = re.compile(r"accepted|superseded by \[(\d{4})\]\((\d{4}-[a-z0-9-]+\.md)\)")
INDEX_ROW = re.compile(r"^\| \[(?P<number>\d{4})\]\((?P<file>[^)]+)\) \| (?P<title>.+) \| (?P<status>.+) \|$", re.M)


def status_of(text: str) -> str:
    """The text behind `- Status:` in a decision."""
    lines = re.findall(r"^- Status: (.+)$", text, re.M)
    assert len(lines) == 1, "a decision has one line with its status"
    return str(lines[0])


def test_every_file_is_a_decision_of_its_own_number() -> None:
    found = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert found == {path.name for path in FILES.values()}
    assert list(FILES) == list(range(1, len(FILES) + 1)), "numbers have a gap, or two files have the same number"


@pytest.mark.parametrize("number", FILES)
def test_decision_has_title_status_date_and_text(number: int) -> None:
    text = FILES[number].read_text()
    assert text.startswith(f"# {number:04d}. ")
    assert re.search(r"^- Date: 20\d\d-\d\d-\d\d$", text, re.M)
    assert STATUS.fullmatch(status_of(text)), "the status is `accepted` or `superseded by [NNNN](NNNN-title.md)`"
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[:2] == ["Context", "Decision"]
    assert set(headings[2:]) <= {"Consequences", "Rejected"}


@pytest.mark.parametrize("number", FILES)
def test_superseding_decision_exists_and_is_newer(number: int) -> None:
    match = STATUS.fullmatch(status_of(FILES[number].read_text()))
    if match and match[1]:
        newer = int(match[1])
        assert newer > number
        assert FILES[newer].name == match[2]


def test_index_states_every_title_and_status() -> None:
    rows = [match.groups() for match in INDEX_ROW.finditer((FOLDER / "README.md").read_text())]
    expected = []
    for number, path in FILES.items():
        text = path.read_text()
        title = text.splitlines()[0].partition(". ")[2]
        expected.append((f"{number:04d}", path.name, title, status_of(text)))
    assert rows == expected


def test_named_decisions_exist() -> None:
    pattern = "--extended-regexp", "-e", r"[Dd]ecision \[?[0-9]+"
    listed = subprocess.run(
        ["git", "grep", "--only-matching", "-h", *pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    named = {int(re.findall(r"\d+", line)[0]) for line in listed.stdout.splitlines()}
    assert named, "docs/decisions itself refers to decisions by number"
    assert named <= set(FILES)
