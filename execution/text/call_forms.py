"""How chat templates write calls of tools, and structural tags that keep output to that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from execution.text.prompt import ChatMessage, ToolCall

#: What differs between calls, by how texts of `FAMILIES` say it, and what a template gets to write, so that its form
#: shows. Some templates refuse ids that have not nine characters.
_PLACES: Final = {"<name>": "probe", "<id>": "probe0001", "<arguments>": '{"count": 1}'}
_NAME, _ID, _ARGUMENTS = _PLACES.values()
#: Some templates write it behind the arguments; models leave it out.
_WRITTEN_ID: Final = f', "id": "{_ID}"'
_PLACE: Final = re.compile("|".join(_PLACES))
_TOOL: Final = {"type": "function", "function": {"name": _NAME, "description": "Counts.", "parameters": {}}}
_QUESTION: Final = ChatMessage("user", content="?")
_CALL: Final = ChatMessage("assistant", content="", tool_calls=(ToolCall(_ID, _NAME, _ARGUMENTS),))

#: Ids of calls that the model makes up.
_ANY_ID: Final = "[a-zA-Z0-9]{9}"
#: Text that does not begin with a brace.
_NO_BRACE: Final = r"(?s:\s*([^\s{].*)?)"

_SPACE: Final = r"\s*"
_WORD_OR_SIGN: Final = re.compile(r"\w+|[^\w\s]")

#: Turns, tools, and whether to open the assistant's turn -> text.
Render = Callable[[Sequence[ChatMessage], Sequence[Mapping[str, Any]], bool], str]


def _spell(text: str, *, before: str = "", behind: str = "") -> str:
    """Returns a regular expression of a text's words and signs, with others around each."""
    return "".join(f"{before}{re.escape(part)}{behind}" for part in _WORD_OR_SIGN.findall(text))


@dataclass(frozen=True, slots=True)
class _Family:
    """Templates that write calls alike, but for white space.

    Attributes:
        name: What errors call it.
        mark: What begins calls wherever it stands. If empty, an answer that begins with a brace is a call.
        begin: What is before the first call.
        call: A call, with names of `_PLACES`.
        end: What is behind the last call.
        is_list: Whether `begin` and `end` are around all calls, not around each.
        separator: What is between two calls.
        told: How templates tell the model of the form; some write no calls themselves.
    """

    name: str
    mark: str
    begin: str
    call: str
    end: str
    is_list: bool = False
    separator: str = ""
    told: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """What a call consists of beside its places."""
        return tuple(_PLACE.split(self.call))

    def find(self, written: str, begin: str) -> re.Match[str] | None:
        """Finds the call of `_CALL` behind a text; groups are what is before it, its `texts`, and what is behind it."""
        *heads, tail = self.texts
        places = [_spell(_PLACES[place], before=_SPACE) for place in _PLACE.findall(self.call)]
        pattern = [f"({_spell(head, behind=_SPACE)}){place}" for head, place in zip(heads, places, strict=True)]
        pattern += [f"(?:{_spell(_WRITTEN_ID, before=_SPACE)})?"]
        pattern += [f"({_spell(text, before=_SPACE)})" for text in (tail, self.end)]
        return re.search(f"{re.escape(begin)}({_spell(self.begin, behind=_SPACE)}){''.join(pattern)}", written)


_JSON: Final = '{"name": "<name>", "arguments": <arguments>}'

#: The first that is found counts.
FAMILIES: Final = (
    _Family(
        "tags",
        mark="<tool_call>",
        begin="<tool_call>\n",
        call=_JSON,
        end="\n</tool_call>",
        separator="\n",
        told="return a json object with function name and arguments within <tool_call></tool_call> XML tags",
    ),
    _Family("list", "[TOOL_CALLS]", "[TOOL_CALLS] [", _JSON, "]", is_list=True, separator=", "),
    _Family("named", "[TOOL_CALLS]", "[TOOL_CALLS]", "<name>[ARGS]<arguments>", ""),
    _Family("numbered", "[TOOL_CALLS]", "[TOOL_CALLS]", "<name>[CALL_ID]<id>[ARGS]<arguments>", ""),
    _Family("piped_tags", "<|tool_call|>", "<|tool_call|>", _JSON, "<|/tool_call|>"),
    _Family("piped_list", "<|tool_call|>", "<|tool_call|>[", _JSON, "]<|/tool_call|>", is_list=True, separator=", "),
    _Family(
        "open_list",
        mark="<|tool_call|>",
        begin="<|tool_call|>[",
        call=_JSON,
        end="]",
        is_list=True,
        separator=", ",
        told="<|tool_call|> followed by a JSON list of tools",
    ),
    _Family(
        "actions",
        mark="Action:",
        begin="Action:\n```json\n[",
        call='{"tool_name": "<name>", "parameters": <arguments>}',
        end="]```",
        is_list=True,
        separator=",\n    ",
    ),
    _Family("bare_json", "", "", '{"name": "<name>", "parameters": <arguments>}', ""),
)


#: An answer has text and calls, no call, or calls alone.
MODES: Final = ("AUTO", "NONE", "REQUIRED")


class CallForm(msgspec.Struct, frozen=True):
    """How one template writes calls of tools.

    Attributes:
        family: Name of the family in `FAMILIES`.
        begin: Text before the first call.
        call: Texts of a call, between which are its name, an id if the family has ids, and its arguments.
        end: Text behind the last call.
    """

    family: str
    begin: str
    call: tuple[str, ...]
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
    """Finds how a template writes calls, or tells the model to; None if in none of the known forms."""
    opened = render([_QUESTION], [_TOOL], True)
    written = render([_QUESTION, _CALL], [_TOOL], False)
    for family in FAMILIES:
        # Without a mark, only its place at the beginning of an answer tells a call.
        if found := family.find(written, "" if family.mark else opened):
            begin, *call, end = found.groups()
            return CallForm(family.name, begin, tuple(call), end)
    told = (family for family in FAMILIES if family.told and family.told in opened)
    return next((CallForm(family.name, family.begin, family.texts, family.end) for family in told), None)


def write_choice(choice: ToolChoice, form: CallForm, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes a choice as a structural tag, in JSON; `tools` has the schema of each function's arguments by its name."""
    family = next(one for one in FAMILIES if one.name == form.family)
    around = ("", "") if family.is_list else (form.begin, form.end)
    tags = {name: _write_call(name, schema, form.call, around) for name, schema in tools.items()}
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


def _write_call(name: str, schema: Mapping[str, Any], call: Sequence[str], around: tuple[str, str]) -> dict[str, Any]:
    head, behind_name, *behind_id, tail = call
    # A name between quotes is one of JSON.
    spelled = json.dumps(name, ensure_ascii=False)[1:-1] if head.endswith('"') else name
    content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    for text in behind_id:
        parts = [{"type": "regex", "pattern": _ANY_ID}, {"type": "const_string", "value": text}, content]
        content = {"type": "sequence", "elements": parts}
    begin, end = around
    return {"type": "tag", "begin": f"{begin}{head}{spelled}{behind_name}", "content": content, "end": f"{tail}{end}"}


def _write(part: Mapping[str, Any]) -> str:
    return json.dumps({"format": part}, ensure_ascii=False)
