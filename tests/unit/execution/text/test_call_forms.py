"""Calls of tools as families of chat templates write them, and output that is kept to that."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Final

import jsonschema
import pytest
import tokenizers

from execution.text import call_forms
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
JSON: Final = ('{"name": "', '", "arguments": ', "}")
FORMS: Final = {
    "llama-3": CallForm("bare_json", "", ('{"name": "', '", "parameters": ', "}"), ""),
    "mistral": CallForm("list", "[TOOL_CALLS] [", JSON, "]"),
    "mistral-small-3.2": CallForm("numbered", "[TOOL_CALLS]", ("", "[CALL_ID]", "[ARGS]", ""), ""),
    "devstral": CallForm("named", "[TOOL_CALLS]", ("", "[ARGS]", ""), ""),
    "phi-4-mini": CallForm("piped_tags", "<|tool_call|>", JSON, "<|/tool_call|>"),
    "phi-4-mini-list": CallForm(
        "piped_list", "<|tool_call|>[", ('{"name":"', '","arguments":', "}"), "]<|/tool_call|>"
    ),
    "granite-3": CallForm(
        "open_list",
        "<|tool_call|>[\n    ",
        ('{\n        "name": "', '",\n        "arguments": ', "\n    }"),
        "\n]",
    ),
    "granite-3.3": CallForm("open_list", "<|tool_call|>[", JSON, "]"),
    "command-r": CallForm(
        "actions",
        "Action:\n```json\n[\n    ",
        ('{\n        "tool_name": "', '",\n        "parameters": ', "\n    }"),
        "\n]```",
    ),
    "smollm-3": CallForm("tags", "<tool_call>\n", JSON, "\n</tool_call>"),
    "qwen-2.5": CallForm("tags", "<tool_call>\n", JSON, "\n</tool_call>"),
    "kiln-tiny-tools": CallForm("tags", "<tool_call>\n", JSON, "\n</tool_call>"),
}
#: A call of `find` as each family writes it, what is between two of them, and what is around all.
CALLS: Final = {
    "llama-3": ('{"name": "find", "parameters": {"count": 7}}', "", "", ""),
    "mistral": ('{"name": "find", "arguments": {"count": 7}}', ", ", "[TOOL_CALLS] [", "]"),
    "mistral-small-3.2": ('[TOOL_CALLS]find[CALL_ID]aB3dE6gH9[ARGS]{"count": 7}', "", "", ""),
    "devstral": ('[TOOL_CALLS]find[ARGS]{"count": 7}', "", "", ""),
    "phi-4-mini": ('<|tool_call|>{"name": "find", "arguments": {"count": 7}}<|/tool_call|>', "", "", ""),
    "phi-4-mini-list": ('{"name":"find","arguments":{"count": 7}}', ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    "granite-3.3": ('{"name": "find", "arguments": {"count": 7}}', ", ", "<|tool_call|>[", "]"),
    "command-r": (
        '{\n        "tool_name": "find",\n        "parameters": {"count": 7}\n    }',
        ",\n    ",
        "Action:\n```json\n[\n    ",
        "\n]```",
    ),
    "qwen-2.5": ('<tool_call>\n{"name": "find", "arguments": {"count": 7}}\n</tool_call>', "\n", "", ""),
}
FAMILIES = pytest.mark.parametrize("family", CALLS)
#: What is special in tokenizers of Mistral, Phi and Granite.
SPECIAL: Final = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>")


@cache
def writer() -> Writer:
    return Writer(TOKENIZER, 2048, (2, 3))


@pytest.fixture(scope="module")
def special_writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Of the same tokenizer, with marks of calls that are no text."""
    library = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    library.add_special_tokens([*SPECIAL])
    path = tmp_path_factory.mktemp("special") / "tokenizer.json"
    library.save(str(path))
    return Writer(Tokenizer(path), library.get_vocab_size(), (2, 3))


@pytest.mark.parametrize("family", [*FAMILY_CHATS, "kiln-tiny-tools"])
def test_forms_are_found(family: str) -> None:
    source = FAMILY_CHATS.get(family) or (MODEL / "chat_template.jinja").read_text()
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert BundleText(TOKENIZER, {"default": template}).find_call_form("") == FORMS.get(family)


def test_every_family_has_a_template() -> None:
    assert {form.family for form in FORMS.values()} == {family.name for family in call_forms.FAMILIES}


def row_of(family: str) -> Any:
    return next(row for row in call_forms.FAMILIES if row.name == FORMS[family].family)


def write_calls(family: str, num_calls: int) -> str:
    """Writes calls of `find` as a family does."""
    call, separator, begin, end = CALLS[family]
    return begin + separator.join([call] * num_calls) + end


def read_calls(text: str, family: str) -> list[tuple[str, Any]]:
    """Reads names and arguments of calls as gateways do; fails where a text is not calls alone."""
    call, separator, begin, end = CALLS[family]
    one = re.escape(call).replace("find", "(.+?)").replace(re.escape('{"count": 7}'), r"(\{[^{}]*\})")
    found = [*re.finditer(one.replace("aB3dE6gH9", "[a-zA-Z0-9]{9}"), text)]
    assert text == begin + separator.join(each[0] for each in found) + end
    spelled = [(json.loads(f'"{each[1]}"') if '"find"' in call else each[1], each[2]) for each in found]
    return [(name, json.loads(arguments)) for name, arguments in spelled]


def check_calls(text: str, family: str) -> list[str]:
    """Checks that all calls validate; returns the names of their functions."""
    calls = read_calls(text, family)
    for name, arguments in calls:
        jsonschema.validate(arguments, TOOLS[name])
    return [name for name, _ in calls]


def constrain(choice: ToolChoice, family: str) -> Constraint:
    return Constraint(kind="structural_tag", text=write_choice(choice, FORMS[family], TOOLS))


@FAMILIES
@pytest.mark.parametrize("is_special", [False, True])
def test_real_calls_are_let_through_and_others_not(family: str, special_writer: Writer, *, is_special: bool) -> None:
    used = special_writer if is_special else writer()

    def lets(choice: ToolChoice, *texts: str) -> list[bool]:
        return [used.lets_through(constrain(choice, family), text) for text in texts]

    required, auto, none = (ToolChoice(mode) for mode in ("REQUIRED", "AUTO", "NONE"))
    named, other, alone = (ToolChoice("REQUIRED", name, parallel_calls=False) for name in ("find", 'say "é"', None))
    one, two = write_calls(family, 1), write_calls(family, 2)
    wrong = [one.replace("find", "lose"), one.replace("7", "700"), one.replace("count", "amount"), one[:-1]]
    has_mark, is_list = bool(row_of(family).mark), row_of(family).is_list
    for choice in (required, auto, named, alone):
        assert lets(choice, one, *wrong) == [True, *[False] * len(wrong)]
        assert lets(choice, two) == [has_mark and choice in (required, auto)]
        assert lets(choice, "", f"a{one}", f"{one}a", "It is sunny.") == (
            [False] * 4 if choice is not auto else [True, True, has_mark and not is_list, True]
        )
    assert lets(none, one, "It is sunny.", f"a{one}") == [False, True, not has_mark]
    assert lets(other, one) == [False]


@FAMILIES
def test_required_calls_validate(family: str) -> None:
    several, alone = (ToolChoice("REQUIRED", parallel_calls=is_parallel) for is_parallel in (True, False))
    names = list[list[str]]()
    for seed in range(15):
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
        for seed in range(4):
            text = writer().write(constrain(ToolChoice(function=name), family), seed, 150)
            assert text is not None
            assert check_calls(text, family) == [name]


@FAMILIES
def test_auto_has_text_or_calls_that_validate(family: str) -> None:
    constraint = constrain(ToolChoice(parallel_calls=False), family)
    lead = "I look. " if row_of(family).mark else ""
    begin = lead + (row_of(family).mark or "{")
    texts = [writer().write(constraint, seed, 150, begin) for seed in range(10)]
    for text in texts:
        assert text is not None
        assert len(check_calls(text.removeprefix(lead), family)) == 1


@FAMILIES
def test_none_never_calls(family: str) -> None:
    constraint = constrain(ToolChoice("NONE"), family)
    *begin, last = row_of(family).mark or "{"
    tokens = TOKENIZER.encode(f"a {''.join(begin)}", add_special_tokens=False) if begin else []
    found = writer().follow(1, 0, tokens, constraint) if tokens else None
    mask = writer().matchers.compile(constraint) if found is None else found.mask
    spelled = {TOKENIZER.token_text(one) for one in writer().allowed(mask)}
    assert len(spelled) > 1000
    assert not [text for text in spelled if text.startswith(last)]
    writer().matchers.forget([1])
