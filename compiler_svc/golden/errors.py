"""Errors of the golden check.

KilnError
└── GoldenMismatch    an executable that does not compute what the reference computes
"""

from __future__ import annotations

from bundle.errors import KilnError


class GoldenMismatch(KilnError):
    """An executable that does not compute what the reference computes."""

    reason = "GOLDEN_MISMATCH"

    def __init__(self, tag: str, position: int, detail: str) -> None:
        super().__init__(
            f"executable {tag} differs from the reference at position {position}: {detail}",
            tag=tag,
            position=position,
            detail=detail,
        )
