"""Writes docs/sampling.md from the code: `python -m tests.architecture.sampling_table`."""

from __future__ import annotations

from collections.abc import Mapping

from execution.sampling_parameters import PARAMETERS, Need, Parameter
from tests.repository import ROOT

PAGE = ROOT / "docs" / "sampling.md"
HEAD = """\
# Sampling parameters

Made from the code by `make docs`; a test compares the two. A value that changes nothing is always accepted; another one
needs what the last column says, or is refused by name.

| field | accepts | changes nothing | what it does | needs |
|---|---|---|---|---|
"""
NEEDS = {
    Need.NOTHING: "",
    Need.CHOICE: "a bundle that takes it with each step (`Capabilities.dynamic_sampling`)",
    Need.LATER: "a later release: not served yet",
}


def render_row(row: Parameter) -> str:
    """One parameter."""
    accepts, neutral = str(row.domain).replace("inf;", "`Capabilities.max_top_k`;"), row.neutral
    if isinstance(neutral, Mapping):
        accepts, neutral = f"pairs of token id and {accepts}", "no pair"
    cells = (f"`sampling.{row.name}`", accepts, "" if neutral is None else f"{neutral}", row.effect, NEEDS[row.need])
    return f"| {' | '.join(cells)} |\n"


def render_page() -> str:
    """The whole page."""
    return HEAD + "".join(map(render_row, PARAMETERS.values()))


if __name__ == "__main__":
    PAGE.write_text(render_page())
