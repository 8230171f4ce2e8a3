"""Tools of a chat and arguments of calls. They come as JSON text, so templates see the client's order and numbers."""

from __future__ import annotations

import json
from typing import Any, Final

#: How errors name what `parse_object` accepts.
ACCEPTED_OBJECT: Final = "one JSON object"


def parse_object(text: str) -> dict[str, Any]:
    """Reads a JSON object; keeps the order of keys and exact integers.

    Raises ValueError if the text is no JSON object, or JSON cannot write the object again: it is nested too deeply, or
    has numbers out of range or halves of surrogate pairs.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}")  # noqa: TRY004 - what is wrong is the text's value
    return value
