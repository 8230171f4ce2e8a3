"""Chats as users write them, from the client's function to token ids, beside transformers' `apply_chat_template`.

Where docs/api.md has rules of its own, transformers gets what they say: arguments are an object, and a template that
does not loop over parts gets their texts with a line break between them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from jinja2 import TemplateError
from kiln.runtime.v1.generation_pb2 import GenerateRequest
from kiln_client import chat
from transformers import PreTrainedTokenizerFast

from execution.text.bundle_text import BundleText
from execution.text.chat_template import ChatTemplate, ChatTemplateError
from execution.text.prompt import ChatPrompt
from execution.text.tokenizer import Tokenizer
from runtime_svc.api.generation_wire import prompt_from_pb
from tests.bundles.published import CHAT_TEMPLATE
from tests.checkpoints.family_chats import FAMILY_CHATS
from tests.checkpoints.tokenizer_files import byte_level
from tests.repository import ROOT
from tests.unit.execution.text import test_chat_template, test_prompt

TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES: Final = {
    **FAMILY_CHATS,
    **test_chat_template.TEMPLATES,
    "turn": test_prompt.TOOLS_TEMPLATE,
    "parts": test_prompt.PARTS,
    "published": CHAT_TEMPLATE,
    "kiln-tiny": (ROOT / "examples/models/kiln-tiny/chat_template.jinja").read_text(),
}

USER: Final = {"role": "user", "content": "hello"}
FUNCTION: Final = {"name": "weather", "arguments": {"in": "Paris", "days": 2}}
CALL: Final = {"id": "c1", "type": "function", "function": FUNCTION}
RESULT: Final = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "7"}
#: A message of OpenAI's client that calls a tool, as `model_dump` writes it.
DUMPED: Final = {
    "content": None,
    "refusal": None,
    "role": "assistant",
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [CALL | {"function": FUNCTION | {"arguments": json.dumps(FUNCTION["arguments"])}}],
}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def answers(**turn: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", **turn}]


SHAPES: Final[dict[str, list[dict[str, Any]]]] = {
    "plain": [{"role": "system", "content": "Be brief."}, *answers(content="world"), USER],
    "null content": answers(content=None),
    "no content": answers(),
    "empty content": answers(content=""),
    "parts": [{"role": "user", "content": parts("a", "b")}, *answers(content=parts("c"))[1:]],
    "empty part": [{"role": "user", "content": parts("")}],
    "no parts": answers(content=[]),
    "call with null content": [*answers(content=None, tool_calls=[CALL]), RESULT],
    "call without content": [*answers(tool_calls=[CALL]), RESULT],
    "call with empty content": [*answers(content="", tool_calls=[CALL]), RESULT, USER],
    "call with content": answers(content="I look.", tool_calls=[CALL]),
    "call with parts": answers(content=parts("I", "look."), tool_calls=[CALL]),
    "calls": [*answers(content=None, tool_calls=[CALL, CALL | {"id": "c2"}]), RESULT, RESULT | {"tool_call_id": "c2"}],
    "call without id": answers(content=None, tool_calls=[{"type": "function", "function": FUNCTION}]),
    "call with JSON arguments": [USER, DUMPED, RESULT],
    "call without arguments": answers(tool_calls=[CALL | {"function": {"name": "now", "arguments": {}}}]),
    "null calls": answers(content="world", tool_calls=None, name=None, tool_call_id=None),
    "null result": [*answers(tool_calls=[CALL]), RESULT | {"content": None, "name": None}],
    "result of parts": [*answers(tool_calls=[CALL]), RESULT | {"content": parts("7", "8")}],
    "names": [USER | {"name": "ann"}, *answers(content="world", name="bob")[1:]],
    "null reasoning": answers(content="world", reasoning_content=None, thinking=None, reasoning=None),
    "reasoning_content": answers(content="world", reasoning_content="hm"),
    "thinking": answers(content="world", thinking="hm"),
    "reasoning": answers(content="world", reasoning="hm"),
    "empty reasoning_content": answers(content="<think>x</think>world", reasoning_content=""),
    "empty thinking": answers(content="<think>x</think>world", thinking=""),
    "empty reasoning": answers(content="<think>x</think>world", reasoning=""),
    "two reasonings": answers(content="world", thinking="first", reasoning="second"),
    "three reasonings": answers(content="world", reasoning="c", thinking="b", reasoning_content="a"),
    "reasoning before a call": [*answers(content=None, reasoning="hm", tool_calls=[CALL]), RESULT],
    "only reasoning": answers(content=None, thinking="hm"),
}


def prompt_of(messages: list[Any], tools: list[Any]) -> ChatPrompt:
    """The conversation as the runtime reads it."""
    prompt = prompt_from_pb(GenerateRequest(chat=chat(messages, tools=tools)))
    assert isinstance(prompt, ChatPrompt)
    return prompt


def by_our_rules(turn: dict[str, Any], *, takes_parts: bool) -> dict[str, Any]:
    """What transformers is to be given for the same text."""
    turn = json.loads(json.dumps(turn))
    if isinstance(turn.get("content"), list) and not (takes_parts and turn["content"]):
        turn["content"] = "\n".join(part["text"] for part in turn["content"])
    for call in turn.get("tool_calls") or []:
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return turn


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level().save(str(path))
    return path


@pytest.fixture(scope="module")
def theirs(tokenizer_json: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), **TOKENS)


@pytest.fixture(scope="module")
def ours(tokenizer_json: Path) -> BundleText:
    return BundleText(Tokenizer(tokenizer_json), {name: ChatTemplate(TEMPLATES[name], TOKENS) for name in TEMPLATES})


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_see_what_transformers_gives_them(
    ours: BundleText, theirs: PreTrainedTokenizerFast, name: str
) -> None:
    takes_parts = ChatTemplate(TEMPLATES[name], TOKENS).takes_parts
    rendered = set()
    for shape, messages in SHAPES.items():
        tools = test_chat_template.TOOLS if "call" in shape else []
        prompt = replace(prompt_of(messages, tools), template=name)
        given = [by_our_rules(turn, takes_parts=takes_parts) for turn in messages]
        try:
            expected = theirs.apply_chat_template(
                given, tools=tools or None, chat_template=TEMPLATES[name], add_generation_prompt=True
            )["input_ids"]
        # Whatever transformers raises: Kiln says that the template refuses the chat.
        except (TemplateError, TypeError):
            with pytest.raises(ChatTemplateError):
                ours.encode_chat(prompt)
            continue
        found = ours.encode_chat(prompt)
        assert theirs.decode(found) == theirs.decode(expected), shape
        assert found == expected, shape
        rendered.add(shape)
    assert len(rendered) > len(SHAPES) / 2, "the comparison shows little of a template that refuses most chats"
