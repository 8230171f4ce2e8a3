"""How chat templates write calls of tools, and structural tags that keep output to that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from execution.text.prompt import ChatMessage, ToolCall

#: A call that a template writes, so that its form shows. Some templates refuse ids that have not nine characters.
_NAME, _ARGUMENTS, _ID = "probe", '{"count": 1}', "probe0001"
_TOOL: Final = {"type": "function", "function": {"name": _NAME, "description": "Counts.", "parameters": {}}}
_QUESTION: Final = ChatMessage("user", content="?")
_CALL: Final = ChatMessage("assistant", content="", tool_calls=(ToolCall(_ID, _NAME, _ARGUMENTS),))

#: Text that does not begin with a brace.
_NO_BRACE: Final = r"(?s:\s*([^\s{].*)?)"

#: Turns, tools, and whether to open the assistant's turn -> text.
Render = Callable[[Sequence[ChatMessage], Sequence[Mapping[str, Any]], bool], str]


@dataclass(frozen=True, slots=True)
class _Family:
    """Templates that write calls alike.

    Attributes:
        name: What errors call it.
        mark: What begins calls wherever it stands. If empty, an answer that begins with a brace is a call.
        begin: Regular expression of what is before the first call.
        arguments: Key of a call's arguments, beside `name`.
        end: Regular expression of what is behind the last call.
        is_list: Whether `begin` and `end` are around all calls, not around each.
        separator: What is between two calls.
    """

    name: str
    mark: str
    begin: str
    arguments: str
    end: str
    is_list: bool = False
    separator: str = "\n"


FAMILIES: Final = (
    _Family("tags", "<tool_call>", r"<tool_call>\s*", "arguments", r"\s*</tool_call>"),
    _Family("list", "[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*\[", "arguments", r"\]", is_list=True, separator=", "),
    _Family("bare_json", "", "", "parameters", ""),
)


#: An answer has text and calls, no call, or calls alone.
MODES: Final = ("AUTO", "NONE", "REQUIRED")


class CallForm(msgspec.Struct, frozen=True):
    """How one template writes calls of tools.

    Attributes:
        family: Name of the family in `FAMILIES`.
        begin: Text before the first call.
        end: Text behind the last call.
    """

    family: str
    begin: str
    end: str


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tools an answer calls.

    Attributes:
        mode: One of `MODES`.
        function: The only one that is called, once; None if the mode decides.
        parallel_calls: Whether there may be several calls.
    """

    mode: str = "AUTO"
    function: str | None = None
    parallel_calls: bool = True


def find_form(render: Render) -> CallForm | None:
    """Finds how a template writes calls; None if in none of the known forms."""
    opened = render([_QUESTION], [_TOOL], True)
    written = render([_QUESTION, _CALL], [_TOOL], False)
    for family in FAMILIES:
        call = rf'\{{"name": "{_NAME}", "{family.arguments}": {re.escape(_ARGUMENTS)}(, "id": "{_ID}")?\}}'
        pattern = f"(?P<begin>{family.begin}){call}(?P<end>{family.end})"
        # Without a mark, only its place at the beginning of an answer tells a call.
        if found := re.search(pattern if family.mark else re.escape(opened) + pattern, written):
            return CallForm(family.name, found["begin"], found["end"])
    return None


def write_choice(choice: ToolChoice, form: CallForm, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes a choice as a structural tag, in JSON; `tools` has the schema of each function's arguments by its name."""
    family = next(one for one in FAMILIES if one.name == form.family)
    around = ("", "") if family.is_list else (form.begin, form.end)
    tags = {name: _write_call(name, schema, family, around) for name, schema in tools.items()}
    is_alone = not (choice.parallel_calls and family.mark)
    calls = tags.get(choice.function or "") or {
        "type": "tags_with_separator",
        "tags": [*tags.values()],
        "separator": family.separator,
        "at_least_one": True,
        "stop_after_first": is_alone,
    }
    begun = [*tags.values()]
    if family.is_list:
        calls = {"type": "tag", "begin": form.begin, "content": calls, "end": form.end}
        begun = [calls]
    if choice.function or choice.mode == "REQUIRED":
        return _write(calls)
    if not family.mark:
        text = {"type": "regex", "pattern": _NO_BRACE}
        return _write(text if choice.mode == "NONE" else {"type": "or", "elements": [calls, text]})
    if choice.mode == "NONE":
        return _write({"type": "any_text", "excludes": [family.mark]})
    stops = family.is_list or is_alone
    return _write({"type": "triggered_tags", "triggers": [family.mark], "tags": begun, "stop_after_first": stops})


def _write_call(name: str, schema: Mapping[str, Any], family: _Family, around: tuple[str, str]) -> dict[str, Any]:
    begin, end = around
    head = f'{begin}{{"name": {json.dumps(name, ensure_ascii=False)}, "{family.arguments}": '
    return {"type": "tag", "begin": head, "content": {"type": "json_schema", "json_schema": schema}, "end": "}" + end}


def _write(part: Mapping[str, Any]) -> str:
    return json.dumps({"format": part}, ensure_ascii=False)
