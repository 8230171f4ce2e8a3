"""Finds commands in pages, and says what a user types for them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.first_hour.steps import Step

_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


class CommandNotPrinted(Exception):
    """A page does not print, or no longer prints, a command that a step takes from it."""


def list_code(text: str) -> list[str]:
    """The code blocks and code spans of a page in Markdown."""
    return [*_BLOCK.findall(text), *_SPAN.findall(_BLOCK.sub("", text))]


def find_command(step: Step, root: Path) -> str:
    """What the page of a step prints in a repository: the command; in Python, the whole block that has the line."""
    found = next((code for code in list_code((root / step.page).read_text()) if step.command in code), None)
    if found is None:
        raise CommandNotPrinted(f"{step.page} does not print {step.command!r}")
    return found.strip() if step.language == "python" else step.command


def fill_in(step: Step, printed: str) -> str:
    """Writes the user's own values in place of those of the page, as a command for a shell."""
    for name, value in step.values.items():
        printed = printed.replace(name, value)
    if step.language == "python":
        return f"python -c {shlex.quote(printed)}"
    return f"{printed} {step.more}".strip()
