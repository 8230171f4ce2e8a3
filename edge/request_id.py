"""What a request id is, in metadata and in fields of requests."""

from __future__ import annotations

import re
from typing import Final

from bundle.errors import FieldViolation

#: The key of metadata that carries the id, in both directions.
REQUEST_ID_KEY: Final = "x-request-id"
#: Matches an id in full: it must fit metadata and a line of a log.
REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
#: Errors quote ids that are no longer than this.
_MAX_QUOTED_CHARS: Final = 128
#: How errors name what REQUEST_ID matches.
_ACCEPTED_ID: Final = "1 to 128 printable characters of ASCII, no spaces"


def make_id_violation(field: str, value: str) -> FieldViolation:
    """Makes the violation of a field whose value REQUEST_ID does not match."""
    shown = repr(value) if len(value) <= _MAX_QUOTED_CHARS else f"{len(value)} characters"
    return FieldViolation(field, shown, _ACCEPTED_ID)
