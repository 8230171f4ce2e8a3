"""Values of requests as errors quote them."""

from __future__ import annotations

from typing import Final

# Errors quote invalid values, but only the beginning of long ones.
MAX_QUOTED_CHARS: Final = 60
# A thousand violations of one list tell the client no more than ten.
MAX_VIOLATIONS_PER_LIST: Final = 10


def quote_value(value: object) -> str:
    """Formats a value: a float32 with the digits that the client wrote; what is neither number nor text is `set`."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return f"{value:.7g}"
        case str():
            return repr(value[:MAX_QUOTED_CHARS])
    return "set"
