"""Errors of the golden check."""

from __future__ import annotations

from bundle.errors import KilnError


class GoldenMismatch(KilnError, code="INTERNAL"):
    """An executable that does not compute what the reference computes."""

    message = "executable {tag} differs from the reference at position {position}: {detail}"
    tag: str
    position: int
    detail: str
