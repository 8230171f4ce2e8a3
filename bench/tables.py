"""Tables of pages."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, ...]


def render_table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Renders a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def count_streams(count: int) -> str:
    """Returns `1 stream`, `4 streams`."""
    return f"{count} stream{'s' if count > 1 else ''}"
