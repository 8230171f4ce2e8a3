"""Tools that a chat offers to the model: JSON text, so that templates see keys and numbers as they were written."""

from __future__ import annotations

import json
from typing import Any, Final

#: What a tool's text has to be.
ACCEPTED_TOOL: Final = "one JSON object"


def parse_tool(text: str) -> dict[str, Any]:
    """Reads a tool, keys in the order given and integers exact.

    Raises:
        ValueError: The text is no JSON object, or one that cannot be written down again: nested too deeply, with
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
