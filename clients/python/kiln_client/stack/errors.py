"""Errors of what is private to a home, and of the tokens that its key signs.

FailedPrecondition
├── HomeNotPrivate      a home that other users may enter, and that is not this user's to close
└── TokenNotMade        a token that could not be signed or written
NotFound
└── KeyNotFound         a home without a key
"""

from __future__ import annotations

from pathlib import Path

from kiln_client.errors import FailedPrecondition, NotFound


class HomeNotPrivate(FailedPrecondition):
    """A home that other users may enter, and that is not this user's to close."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            f"other users may enter {home}, which would hold keys and prompts, and this user may not change that:"
            " choose another --home, or let its owner run `chmod go=` on it",
            reason="HOME_NOT_PRIVATE",
            metadata={"home": str(home)},
        )


class TokenNotMade(FailedPrecondition):
    """A token that could not be signed with the key of a home, or not written."""

    def __init__(self, home: Path, detail: str) -> None:
        super().__init__(
            f"the key of {home} signs no token: {detail}",
            reason="TOKEN_NOT_MADE",
            metadata={"home": str(home), "detail": detail},
        )


class KeyNotFound(NotFound):
    """A home without a key, because no services have started there."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            f"{home} has no key that signs tokens: the services of a home make one when they start, as by"
            f" `kiln up --home {home}`",
            reason="KEY_NOT_FOUND",
            metadata={"home": str(home)},
        )
