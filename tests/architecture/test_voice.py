"""The voice of code and pages: a short list of words that are not used here, and docstrings that are sentences.

CONTRIBUTING.md says how to write; this holds what a machine can check. `COVERED` grows as folders are mended.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import ROOT, list_tracked

#: Pattern of a banned word → what to say instead.
BANNED = {
    r"nurser(y|ies)": "forkserver",
    r"workshops?": "services",
    r"bring[_-]up": "loader",
    r"convergence": "reconcile, reconciler",
    r"judg(e|es|ed|ing|ement|ements|ment|ments)": "validate, validation",
    r"whoever": "the caller, the client, …",
    r"nobody": "no caller, no client, …",
    r"somebody": "a caller, a client, …",
    r"(for|counts for|does) nothing": "in vain, is ignored, has no effect",
    r"(?-i:_?(MOST|LARGEST|LONGEST)_[A-Z]\w*)": "MAX_*",
}
PATTERN = re.compile("|".join(rf"(?P<w{index}>(?<!\w){word}(?!\w))" for index, word in enumerate(BANNED)), re.I)

#: Files and folders that are checked.
COVERED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "bench",
    "bundle",
    "clients/python",
    "clients/typescript/README.md",
    "compiler_svc",
    "docs",
    "edge",
    "examples",
    "execution",
    "runtime_svc",
    "targets",
    "tests",
)

#: Written by programs from sources elsewhere, text that models are trained on, and this list itself.
EXCLUDED = (
    "bench/RESULTS-intel.md",
    "bench/RESULTS.md",
    "clients/typescript/src/gen",
    "docs/first-hour.md",
    "examples/tiny",
    "protos/google",
    "tests/architecture/test_voice.py",
)
SUFFIXES = {".md", ".proto", ".py", ".toml", ".yaml", ".yml"}


def covered_files() -> list[str]:
    excluded = tuple(f"{name}/" for name in EXCLUDED)
    return [
        name
        for name in list_tracked(*COVERED)
        if Path(name).suffix in SUFFIXES and "_pb2" not in name and not f"{name}/".startswith(excluded)
    ]


def find_banned(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word found and what to say instead, for each banned word. A string that is one such word is data."""
    replacements = list(BANNED.values())
    for number, line in enumerate(text.splitlines(), start=1):
        for match in PATTERN.finditer(line):
            if line[: match.start()].endswith('"') and line[match.end() :].startswith('"'):
                continue
            index = next(i for i in range(len(BANNED)) if match[f"w{i}"])
            yield number, match[0], replacements[index]


def find_short_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring that is a single word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) is not None and len(text.split()) < 2:
            yield node.body[0].lineno, text


def test_covered_paths_exist() -> None:
    files = covered_files()
    for covered in COVERED:
        assert any(f"{name}/".startswith(f"{covered}/") for name in files), f"{covered}: nothing to check there"


def test_no_banned_words() -> None:
    found = [
        f"{name}:{line}: {word!r}; say: {instead}"
        for name in covered_files()
        for line, word, instead in find_banned((ROOT / name).read_text())
    ]
    assert not found, "\n".join(found)


def test_docstrings_are_more_than_a_word() -> None:
    found = [
        f"{name}:{line}: {text!r}"
        for name in covered_files()
        if name.endswith(".py")
        for line, text in find_short_docstrings((ROOT / name).read_text())
    ]
    assert not found, "\n".join(found)


FOUND = (
    "Nobody reads it.",
    "the nursery's ranks",
    "_MOST_VIOLATIONS = 16",
    "is computed for nothing",
    "judged as a whole",
)
OTHERS = ("most_recent", "MAX_VIOLATIONS", "the largest_size of all", "needs nothing else", 'getpwnam("nobody")')


@pytest.mark.parametrize("text", [*FOUND, '"nobody knows its bundle yet"', *OTHERS])
def test_banned_words_are_found_and_others_are_not(text: str) -> None:
    assert len(list(find_banned(text))) == (text not in OTHERS)


def test_one_word_docstrings_are_found() -> None:
    source = '"""Every module says more."""\ndef close():\n    """Closes."""\n    """Not a docstring."""\n'
    assert list(find_short_docstrings(source)) == [(3, "Closes.")]
