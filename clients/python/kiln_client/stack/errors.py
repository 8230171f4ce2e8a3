"""Errors of homes that are not as private as what they hold.

FailedPrecondition
└── HomeNotPrivate    a home that other users may enter, and that is not this user's to close
"""

from __future__ import annotations

from pathlib import Path

from kiln_client.errors import FailedPrecondition


class HomeNotPrivate(FailedPrecondition):
    """A home that other users may enter, and that is not this user's to close."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            f"other users may enter {home}, which would hold keys and prompts, and this user may not change that:"
            " choose another --home, or let its owner run `chmod go=` on it",
            reason="HOME_NOT_PRIVATE",
            metadata={"home": str(home)},
        )
