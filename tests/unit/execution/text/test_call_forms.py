"""Calls of tools as families of chat templates write them, and output that is kept to that."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Final

import jsonschema
import pytest

from execution.text.bundle_text import BundleText
from execution.text.call_forms import CallForm, ToolChoice, write_choice
from execution.text.chat_template import ChatTemplate
from execution.text.constraint import Constraint
from execution.text.tokenizer import Tokenizer
from tests.checkpoints.family_chats import FAMILY_CHATS
from tests.constraints.writer import Writer
from tests.repository import ROOT

MODEL: Final = ROOT / "examples/models/kiln-tiny-tools"
TOKENIZER: Final = Tokenizer(MODEL / "tokenizer.json")
#: The arguments end within a few tokens, so that most texts do.
TOOLS: Final[dict[str, dict[str, Any]]] = {
    "find": {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 99}, "exact": {"type": "boolean"}},
        "required": ["count"],
        "additionalProperties": False,
    },
    'say "é"': {"type": "object", "properties": {"to": {"enum": ["Anna", None]}}, "additionalProperties": False},
}
FORMS: Final = {
    "llama-3": CallForm("bare_json", "", ""),
    "mistral": CallForm("list", "[TOOL_CALLS] [", "]"),
    "qwen-2.5": CallForm("tags", "<tool_call>\n", "\n</tool_call>"),
    "kiln-tiny-tools": CallForm("tags", "<tool_call>\n", "\n</tool_call>"),
}


@cache
def writer() -> Writer:
    return Writer(TOKENIZER, 2048, (2, 3))


@pytest.mark.parametrize("family", [*FAMILY_CHATS, "kiln-tiny-tools"])
def test_forms_are_found(family: str) -> None:
    source = FAMILY_CHATS.get(family) or (MODEL / "chat_template.jinja").read_text()
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert BundleText(TOKENIZER, {"default": template}).find_call_form("") == FORMS.get(family)


def read_calls(text: str, family: str) -> list[dict[str, Any]]:
    """Reads calls as gateways do; raises ValueError where a text is not calls alone."""
    if family == "mistral":
        assert text.startswith("[TOOL_CALLS] ")
        calls: list[dict[str, Any]] = json.loads(text.removeprefix("[TOOL_CALLS] "))
        return calls
    if family == "llama-3":
        return [json.loads(text)]
    found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    assert text == "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in found)
    return [json.loads(call) for call in found]


def check_calls(text: str, family: str) -> list[str]:
    """Checks that all calls validate; returns the names of their functions."""
    calls = read_calls(text, family)
    for call in calls:
        assert call.keys() == {"name", "parameters" if family == "llama-3" else "arguments"}
        jsonschema.validate(call.get("arguments", call.get("parameters")), TOOLS[call["name"]])
    return [call["name"] for call in calls]


def constrain(choice: ToolChoice, family: str) -> Constraint:
    return Constraint(kind="structural_tag", text=write_choice(choice, FORMS[family], TOOLS))


FAMILIES = pytest.mark.parametrize("family", ["llama-3", "mistral", "qwen-2.5"])


@FAMILIES
def test_required_calls_validate(family: str) -> None:
    several, alone = (ToolChoice("REQUIRED", parallel_calls=is_parallel) for is_parallel in (True, False))
    names = list[list[str]]()
    for seed in range(30):
        for choice in (several, alone):
            text = writer().write(constrain(choice, family), seed, 300)
            if text is not None:
                names.append(check_calls(text, family))
                assert len(names[-1]) == 1 or choice is several
    assert {name for one in names for name in one} == set(TOOLS)
    assert (max(map(len, names)) > 1) == (family != "llama-3")


@FAMILIES
def test_a_named_function_is_called_once(family: str) -> None:
    for name in TOOLS:
        for seed in range(10):
            text = writer().write(constrain(ToolChoice(function=name), family), seed, 150)
            assert text is not None
            assert check_calls(text, family) == [name]


@FAMILIES
def test_auto_has_text_or_calls_that_validate(family: str) -> None:
    constraint = constrain(ToolChoice(parallel_calls=False), family)
    lead = "" if family == "llama-3" else "I look. "
    begin = lead + {"llama-3": "{", "mistral": "[TOOL_CALLS]", "qwen-2.5": "<tool_call>"}[family]
    texts = [writer().write(constraint, seed, 150, begin) for seed in range(20)]
    for text in texts:
        assert text is not None
        assert len(check_calls(text.removeprefix(lead), family)) == 1
    plain = [*TOKENIZER.encode("It is sunny.", add_special_tokens=False), 2]
    assert writer().draw(constraint, 0, len(plain), plain) == plain[:-1]


@FAMILIES
def test_none_never_calls(family: str) -> None:
    constraint = constrain(ToolChoice("NONE"), family)
    begins = {"llama-3": "", "mistral": "a [TOOL_CALLS", "qwen-2.5": "a <tool_call"}
    tokens = TOKENIZER.encode(begins[family], add_special_tokens=False)
    found = writer().follow(1, 0, tokens, constraint) if tokens else None
    mask = writer().matchers.compile(constraint) if found is None else found.mask
    spelled = {TOKENIZER.token_text(one) for one in writer().allowed(mask)}
    assert len(spelled) > 1000
    assert not [text for text in spelled if text.startswith({"llama-3": "{", "mistral": "]", "qwen-2.5": ">"}[family])]
    writer().matchers.forget([1])
