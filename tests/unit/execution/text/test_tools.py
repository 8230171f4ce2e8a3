"""Tools of a chat, and values that are refused as tools."""

from __future__ import annotations

import json

import pytest

from execution.text.prompt import ChatMessage, ChatPrompt
from execution.text.tools import parse_object
from runtime_svc.admission.calls import check_prompt
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.admission.chats import MAX_TOOL_CHARS, MAX_TOOLS
from runtime_svc.errors import RequestInvalid
from tests.unit.runtime_svc.admission.test_calls import CAPABILITIES

CHAT: Capabilities = CAPABILITIES[0]


def violations_of(*tools: str) -> list[tuple[str, str, str]]:
    prompt = ChatPrompt(messages=(ChatMessage("user", "hi"),), tools_json=tools)
    with pytest.raises(RequestInvalid) as caught:
        check_prompt(prompt, CHAT)
    return [(one.field, one.value, one.accepted) for one in caught.value.violations]


def test_order_and_integers_are_kept() -> None:
    text = '{"z": 18446744073709551617, "a": 1.0, "m": {"y": 1, "b": [true, null]}}'
    assert json.dumps(parse_object(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '"x"', "null", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' + "[" * 60_000],
)
def test_what_is_no_object_is_named(text: str) -> None:
    good = '{"name": "find"}'
    ((field, value, accepted),) = violations_of(good, text)
    assert (field, accepted) == ("chat.tools_json[1]", "one JSON object")
    assert value.startswith(repr(text[:60]))
    assert len(value) < 300


def test_every_bad_tool_is_named() -> None:
    assert [field for field, _, _ in violations_of("1", "{}", "2")] == ["chat.tools_json[0]", "chat.tools_json[2]"]


def test_sizes_are_bounded() -> None:
    long = json.dumps({"a": "x" * MAX_TOOL_CHARS})
    assert violations_of(long) == [
        ("chat.tools_json[0]", f"{len(long)} characters", f"at most {MAX_TOOL_CHARS} characters")
    ]
    assert violations_of(*["{}"] * (MAX_TOOLS + 1)) == [
        ("chat.tools_json", f"{MAX_TOOLS + 1} tools", f"at most {MAX_TOOLS}")
    ]
