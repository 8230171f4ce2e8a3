"""Finds commands in pages, and says what a user types for them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.first_hour.steps import Step

_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


class CommandNotPrinted(Exception):
    """A page does not print, or no longer prints, a command that a step takes from it.

    Attributes:
        page: The page.
        command: The command.
    """

    def __init__(self, page: str, command: str) -> None:
        super().__init__(f"{page} does not print {command!r}")
        self.page = page
        self.command = command


def list_code(text: str) -> list[str]:
    """Lists the code blocks and code spans of a page in Markdown."""
    return [*_BLOCK.findall(text), *_SPAN.findall(_BLOCK.sub("", text))]


def find_command(step: Step, root: Path) -> str:
    """Finds what the page of a step prints.

    Args:
        step: A step.
        root: The repository that has the page.

    Returns:
        The command; in Python, the whole block that has the line.

    Raises:
        CommandNotPrinted: No code of the page has the command.
    """
    found = next((code for code in list_code((root / step.page).read_text()) if step.command in code), None)
    if found is None:
        raise CommandNotPrinted(step.page, step.command)
    return found.strip() if step.language == "python" else step.command


def fill_in(step: Step, printed: str) -> str:
    """Writes the user's own values in place of those of the page, as a command for a shell."""
    for name, value in step.values.items():
        printed = printed.replace(name, value)
    if step.language == "python":
        return f"python -c {shlex.quote(printed)}"
    return f"{printed} {step.more}".strip()
