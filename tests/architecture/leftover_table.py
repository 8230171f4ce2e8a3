"""Writes the table of leftovers into docs/operations/processes.md: `python -m tests.architecture.leftover_table`."""

from __future__ import annotations

from collections.abc import Iterable

from tests.leftovers import LEFTOVERS, PLACES, WORDS
from tests.repository import ROOT

PAGE = ROOT / "docs/operations/processes.md"
BEGIN = "<!-- leftovers: made from the code by `make docs` -->\n"
END = "<!-- end of leftovers -->\n"


def render_table() -> str:
    """Who may leave what, where, and who removes it when."""
    rows = [
        (
            _join(row.processes),
            row.what,
            f"`{row.shown}` in {PLACES[row.place]}",
            f"{row.remover}; {WORDS[row.moment]}",
        )
        for row in LEFTOVERS
    ]
    head = ("| process that dies | may leave | where | removed by; when |", "|---|---|---|---|")
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def render_page(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + render_table() + END + rest.partition(END)[2]


def _join(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
