"""Tools that a chat offers to the model. They come as JSON text, so templates see the client's order and numbers."""

from __future__ import annotations

import json
from typing import Any, Final

#: How errors name an acceptable tool.
ACCEPTED_TOOL: Final = "one JSON object"


def parse_tool(text: str) -> dict[str, Any]:
    """Reads a tool; keeps the order of keys and exact integers.

    Raises:
        ValueError: The text is no JSON object, or JSON cannot write the object again: it is nested too deeply, or has
            numbers out of range or halves of surrogate pairs.
    """
    try:
        tool = json.loads(text)
        json.dumps(tool, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(tool, dict):
        raise ValueError(f"a JSON {type(tool).__name__}")  # noqa: TRY004 - what is wrong is the text's value
    return tool
