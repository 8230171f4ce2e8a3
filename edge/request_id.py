"""What ids are that clients choose: of requests, in metadata and in fields of requests, of sessions, of deployments."""

from __future__ import annotations

import re
from typing import Final

from bundle.errors import FieldViolation

#: The key of metadata that carries the id, in both directions.
REQUEST_ID_KEY: Final = "x-request-id"
#: Begins the pattern of every id: paths are made of ids, and these two are directories.
NO_DOTS: Final = r"(?!\.\.?\Z)"
#: How errors say so, behind what else the id must be.
NO_DOTS_ACCEPTED: Final = "neither '.' nor '..'"
#: Matches an id in full: it must fit metadata and a line of a log.
REQUEST_ID: Final = re.compile(rf"{NO_DOTS}[\x21-\x7e]{{1,128}}")
#: Errors quote ids that are no longer than this.
_MAX_QUOTED_CHARS: Final = 128
#: How errors name what REQUEST_ID matches.
_ACCEPTED_ID: Final = f"1 to 128 printable characters of ASCII, no spaces; {NO_DOTS_ACCEPTED}"


def make_id_violation(field: str, value: str) -> FieldViolation:
    """Makes the violation of a field whose value REQUEST_ID does not match."""
    shown = repr(value) if len(value) <= _MAX_QUOTED_CHARS else f"{len(value)} characters"
    return FieldViolation(field, shown, _ACCEPTED_ID)
