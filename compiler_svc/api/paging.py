"""Page sizes and page tokens of list methods."""

from __future__ import annotations

import base64
from typing import Final, TypeVar

import msgspec

from compiler_svc.errors import PageTokenInvalid

DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1000

KeyT = TypeVar("KeyT")


def choose_page_size(asked: int) -> int:
    """Chooses the page size for a client's request; 0 and less mean the default."""
    return min(asked, MAX_PAGE_SIZE) if asked > 0 else DEFAULT_PAGE_SIZE


def write_page_token(key: object | None) -> str:
    """Makes the token of the page that begins after `key`; empty if there is no further page."""
    return "" if key is None else base64.urlsafe_b64encode(msgspec.json.encode(key)).decode()


def read_page_token(token: str, key: type[KeyT]) -> KeyT | None:
    """Reads the key in a token; None for the first page."""
    if not token:
        return None
    try:
        return msgspec.json.decode(base64.b64decode(token, altchars=b"-_", validate=True), type=key)
    except (ValueError, RecursionError) as error:
        raise PageTokenInvalid(token) from error
