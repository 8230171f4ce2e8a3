"""Validates which tools a Generate call asks for, and makes the constraint of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bundle.errors import FieldViolation
from execution.text.call_forms import FAMILIES, MODES, ToolChoice, write_choice
from execution.text.constraint import Constraint
from execution.text.errors import TextInvalid, TextLimitExceeded, TextRefused
from execution.text.prompt import ChatPrompt, Prompt
from execution.text.tools import parse_object
from runtime_svc.admission.constraints import MAX_CONSTRAINT_CHARS, name_field
from runtime_svc.admission.quotes import quote_value
from runtime_svc.errors import FeatureNotServed
from runtime_svc.text.codec import TextCodec

FIELD: Final = "tool_choice"
_TOOL: Final = "a function with a `name` of its own, and with `parameters` that are a schema of objects"
#: The arguments of a function that says nothing of them.
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def find_choice_violations(choice: ToolChoice, prompt: Prompt | None) -> Iterator[FieldViolation]:
    """Names what is wrong with a choice, and with tools that could do without it."""
    if choice.mode not in MODES:
        yield FieldViolation(f"{FIELD}.mode", choice.mode, f"one of {', '.join(MODES)}")
    if not isinstance(prompt, ChatPrompt) or not prompt.tools_json:
        yield FieldViolation(FIELD, _show(choice), "unset: the prompt is no chat with tools_json")
        return
    names = list[str]()
    for index, text in enumerate(prompt.tools_json):
        try:
            tool = parse_object(text)
        except ValueError:  # which admission names for every chat
            continue
        named = _read_tool(tool)
        if named is None or named[0] in names:
            yield FieldViolation(f"chat.tools_json[{index}]", quote_value(text), _TOOL, quotes_text=True)
        else:
            names.append(named[0])
    if choice.function is not None and choice.function not in names:
        yield FieldViolation(f"{FIELD}.function", quote_value(choice.function), f"one of {', '.join(names)}")
    if (size := sum(map(len, prompt.tools_json))) > MAX_CONSTRAINT_CHARS:
        accepted = f"at most {MAX_CONSTRAINT_CHARS} characters, beside {FIELD}"
        yield FieldViolation("chat.tools_json", f"{size} characters", accepted)


def find_unserved_choice(choice: ToolChoice, lacking: str) -> Iterator[FieldViolation]:
    """Names a choice that a bundle cannot keep for the lack of something."""
    yield FieldViolation(FIELD, _show(choice), f"unset: {lacking}")


async def compile_choice(choice: ToolChoice, prompt: ChatPrompt, text: TextCodec) -> tuple[Constraint, bytes]:
    """Makes the constraint of a choice that `find_choice_violations` has passed; returns it and its first mask."""
    tools = dict(filter(None, (_read_tool(parse_object(one)) for one in prompt.tools_json)))
    try:
        form = await text.find_call_form(prompt.template)
        if form is None:
            forms = ", ".join(family.name for family in FAMILIES)
            lacking = f"the chat template writes calls in none of the forms that Kiln knows, which are {forms}"
            raise FeatureNotServed([*find_unserved_choice(choice, lacking)])
        constraint = Constraint(kind="structural_tag", text=write_choice(choice, form, tools))
        return constraint, await text.compile(constraint)
    except TextRefused as error:
        for index, schema in enumerate(tools.values()):
            await _check_alone(schema, f"chat.tools_json[{index}]", text)
        raise name_field(error, FIELD, _show(choice)) from error
    except (TextLimitExceeded, TextInvalid) as error:
        raise name_field(error, FIELD, _show(choice)) from error


async def _check_alone(schema: Mapping[str, Any], field: str, text: TextCodec) -> None:
    """Names the tool, if its schema is what cannot be kept."""
    written = json.dumps(schema)
    try:
        await text.compile(Constraint(kind="json_schema", text=written))
    except TextRefused as error:
        raise name_field(error, field, quote_value(written)) from error


def _read_tool(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Returns the name of a function and the schema of its arguments; None if it has none."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return None
    name, parameters = function.get("name"), function.get("parameters", _NO_ARGUMENTS)
    if not name or not isinstance(name, str) or not isinstance(parameters, Mapping):
        return None
    return (name, {"type": "object", **parameters}) if parameters.get("type", "object") == "object" else None


def _show(choice: ToolChoice) -> str:
    return choice.mode if choice.function is None else quote_value(choice.function)
