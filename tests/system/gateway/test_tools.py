"""Calls of tools by the shipped model, through SMG, with OpenAI's and Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.repository import ROOT
from tests.servers.gateway import run_gateway
from tests.servers.stack import Stack
from tests.system.runtime_process import SMALL_CONFIG, run_runtime

pytestmark = pytest.mark.slow

MODEL = "caller"
#: The host picks the tokens, so that answers can be kept within schemas.
CONFIG = {
    "neuron_config": {
        name: value
        for name, value in (SMALL_CONFIG["neuron_config"] | {"seq_len": 512, "max_context_length": 256}).items()
        if name != "on_device_sampling_config"
    }
}
# Without the last item the schema lets the small model invent properties.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = {"name": "get_weather", "description": "Get the current weather for a city"}
TOOLS: list[Any] = [{"type": "function", "function": ABOUT | {"parameters": SCHEMA}}]
MESSAGES: list[Any] = [{"role": "user", "content": "What's the weather in Paris?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
RESULT = '{"weather": "sunny"}'


@pytest.fixture(scope="module")
def url(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    digest = stack.provide("gateway-caller", ROOT / "examples/models/kiln-tiny-tools", CONFIG)
    directory: Path = tmp_path_factory.mktemp("tools")
    with run_runtime(stack.compiler, directory / "runtime") as runtime:
        runtime.load(digest, MODEL, threads_per_core=1)
        options = ("--tool-call-parser", "qwen")
        with run_gateway(directory, [runtime.address], *options, HF_ENDPOINT="http://127.0.0.1:0") as url:
            yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_openai_gets_a_call_and_what_its_result_says(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 100}
    asked = client.chat.completions.create(messages=MESSAGES, tool_choice=choice, **options)
    message = asked.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city"}
    if choice == "auto":
        assert asked.choices[0].finish_reason == "tool_calls"
        assert arguments == {"city": "Paris"}
        turn = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        told = client.chat.completions.create(messages=[*MESSAGES, message.model_dump(), turn], **options)
        assert told.choices[0].message.content == "It is sunny in Paris."


@pytest.mark.parametrize("is_parallel", [True, False], ids=["several", "one"])
def test_openai_gets_the_models_call_without_a_choice(client: openai.OpenAI, is_parallel: bool) -> None:
    """`parallel_tool_calls` alone leaves the answer, which has one call, as it is."""
    options: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 100}
    plain = client.chat.completions.create(messages=MESSAGES, **options)
    asked = client.chat.completions.create(messages=MESSAGES, parallel_tool_calls=is_parallel, **options)
    (expected,), (call,) = plain.choices[0].message.tool_calls, asked.choices[0].message.tool_calls
    assert call.function == expected.function


def test_openai_gets_a_call_as_a_stream(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, temperature=0, max_tokens=100, stream=True
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "get_weather"
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Paris"}
    assert len(calls) > 2


def test_anthropic_gets_a_call_and_what_its_result_says(url: str) -> None:
    import anthropic  # noqa: PLC0415 - see test_clients

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        tool: Any = ABOUT | {"input_schema": SCHEMA}
        options: Any = {"model": MODEL, "max_tokens": 100, "tools": [tool], "extra_body": {"temperature": 0}}
        asked = client.messages.create(messages=MESSAGES, **options)
        assert asked.stop_reason == "tool_use"
        (call,) = [block for block in asked.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        turns: Any = [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        told = client.messages.create(messages=[*MESSAGES, *turns], **options)
        assert told.content[0].text == "It is sunny in Paris."  # type: ignore[union-attr]
