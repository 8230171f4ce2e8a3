"""Choices of tools with the shipped model that calls some: at temperature 1, every call validates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from tests.repository import ROOT
from tests.servers.stack import Stack
from tests.system.conftest import CONFIG

pytestmark = pytest.mark.slow

CALLER = ROOT / "examples/models/kiln-tiny-tools"
NAME = "calling"
#: Bounded, so that arguments end within the tokens of a sequence, however unlikely the drawn ones are.
PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": {"type": "string", "maxLength": 8}},
    "add": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"type": "integer", "minimum": 0, "maximum": 9},
    },
}
SCHEMAS = {
    name: {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    for name, properties in PARAMETERS.items()
}
TOOLS = [
    json.dumps({"type": "function", "function": {"name": name, "description": "Helps.", "parameters": schema}})
    for name, schema in SCHEMAS.items()
]
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@pytest.fixture(scope="module")
def calling(stack: Stack) -> Iterator[Stack]:
    """The model at -O0, in one bucket of each kind; the host picks its tokens."""
    options = {name: value for name, value in CONFIG["neuron_config"].items() if name != "on_device_sampling_config"}
    options |= {"context_encoding_buckets": [128], "token_generation_buckets": [256]}
    stack.provide(NAME, CALLER, {"neuron_config": options})
    with stack.deployed(NAME):
        yield stack


def ask(stack: Stack, seed: int, question: str, choice: pb.ToolChoice, temperature: float = 1.0) -> str:
    """Returns the text of an answer; empty if it has not ended."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=question)], tools_json=TOOLS)
    request = pb.GenerateRequest(
        deployment_id=NAME,
        chat=chat,
        tool_choice=choice,
        sampling=pb.SamplingParams(temperature=temperature, top_k=0, top_p=1.0, seed=seed),
        stop=pb.StopConditions(max_new_tokens=120),
    )
    events = list(stack.generation().Generate(request))
    has_ended = events[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN
    return "".join(event.delta.text for event in events) if has_ended else ""


def ask_often(stack: Stack, choice: pb.ToolChoice, question: str = "What is the weather in Paris?") -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda seed: ask(stack, seed, question, choice), range(24))
        return [answer for answer in answers if answer]


def check_calls(text: str) -> list[str]:
    """Checks that all calls of a text validate, and that it has no other mark of one; returns their functions."""
    calls = [json.loads(found) for found in CALL.findall(text)]
    for call in calls:
        jsonschema.validate(call["arguments"], SCHEMAS[call["name"]])
    assert "<tool_call>" not in CALL.sub("", text)
    return [call["name"] for call in calls]


def test_auto_answers_or_calls(calling: Stack) -> None:
    auto = pb.ToolChoice(mode=pb.ToolChoice.MODE_AUTO)
    answers = ask_often(calling, auto)
    assert len(answers) >= 20
    assert len([text for text in answers if check_calls(text)]) >= 12, "the model was trained to call"
    text = ask(calling, 0, "What is the weather in Paris?", auto, temperature=0.0)
    assert text == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_required_calls_and_nothing_else(calling: Stack) -> None:
    for is_parallel in (True, False):
        choice = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, parallel_calls=is_parallel)
        answers = ask_often(calling, choice, "Hello! Tell me a story.")
        assert len(answers) >= 20
        for text in answers:
            names = check_calls(text)
            assert names
            assert is_parallel or len(names) == 1
            assert CALL.sub("", text).strip("\n") == ""


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_function_is_the_one_that_is_called(calling: Stack, name: str) -> None:
    answers = ask_often(calling, pb.ToolChoice(function=name))
    assert len(answers) >= 23
    assert {tuple(check_calls(text)) for text in answers} == {(name,)}


def test_none_never_calls(calling: Stack) -> None:
    answers = ask_often(calling, pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE))
    assert len(answers) >= 20
    assert not [text for text in answers if "<tool_call>" in text]
