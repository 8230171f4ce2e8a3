"""The clients of OpenAI and Anthropic, as they are published, through SMG as it is published."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kiln_client
import openai
import pytest
from kiln.runtime.v1 import generation_pb2 as generation

from tests.repository import ROOT
from tests.servers.gateway import post_json
from tests.servers.stack import tokens_of
from tests.system.gateway.conftest import MESSAGES, MODEL, Fleet, answer
from tests.tools import require_tool

NODE = ROOT / "examples/clients"
PROMPT = "Once upon a time"
#: The text of the tokenizer's begin-of-sequence token.
BOS = "<|begin|>"
SEED = 20_26
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Paris"}'}}


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> openai.OpenAI:
    return fleet.client()


def generate(
    fleet: Fleet,
    *,
    temperature: float | None = None,
    seed: int = SEED,
    sampling: Mapping[str, Any] = {},
    **prompt: object,
) -> tuple[str, list[int]]:
    """Text and token ids that GenerationService gives for a seed, with the checkpoint's sampling."""
    request = generation.GenerateRequest(
        deployment_id=MODEL,
        sampling=generation.SamplingParams(seed=seed, temperature=temperature, **sampling),
        stop=generation.StopConditions(max_new_tokens=24),
        **prompt,  # type: ignore[arg-type]
    )
    events = list(fleet.runtimes[0].generation.Generate(request, timeout=60))
    return "".join(event.delta.text for event in events), tokens_of(events)


def chat(fleet: Fleet, seed: int = SEED) -> str:
    messages = [generation.ChatMessage(**message) for message in MESSAGES]
    return generate(fleet, seed=seed, chat=generation.Chat(messages=messages))[0]


def test_models_are_the_ids_of_deployments(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chats_ask_no_hub(fleet: Fleet, client: openai.OpenAI) -> None:
    before = len(fleet.hub.requests)
    for stream in (False, True):
        answer(client, stream=stream, max_tokens=2)
    post_json(f"{fleet.url}/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 2})
    assert fleet.hub.requests[before:] == []


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_equal_generation_service(fleet: Fleet, client: openai.OpenAI, stream: bool) -> None:
    text = answer(client, stream=stream, max_tokens=24, seed=SEED)
    assert text == chat(fleet) != ""


@pytest.mark.parametrize("turn", [{"content": None, "tool_calls": [CALL]}, {"content": []}], ids=["null", "no parts"])
def test_turns_without_text_equal_generation_service(fleet: Fleet, client: openai.OpenAI, turn: dict[str, Any]) -> None:
    """SMG itself shows templates a content of none, which they print, or a list."""
    messages: list[Any] = [*MESSAGES, {"role": "assistant", **turn}, *MESSAGES]
    answered = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, seed=SEED)
    assert answered.choices[0].message.content == generate(fleet, chat=kiln_client.chat(messages))[0] != ""


def test_choices_are_the_sequences_of_one_request(fleet: Fleet, client: openai.OpenAI) -> None:
    answered = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, seed=SEED, n=3)  # type: ignore[call-overload]
    texts = [one.message.content for one in sorted(answered.choices, key=lambda choice: choice.index)]
    assert texts == [chat(fleet, SEED + index) for index in range(3)]


def test_streams_tell_usage_at_their_end(client: openai.OpenAI) -> None:
    options = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, **options)  # type: ignore[call-overload]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (8, 9)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_equal_generation_service(fleet: Fleet, client: openai.OpenAI, stream: bool) -> None:
    """SMG leaves out what the tokenizer adds, and the runtime puts it in, whatever id a client gives its request."""

    def complete(prompt: str) -> tuple[str, int]:
        options = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": SEED}
        options["extra_headers"] = {"x-request-id": "mine", "x-correlation-id": "mine"}
        if not stream:
            whole = client.completions.create(**options)  # type: ignore[call-overload]
            return whole.choices[0].text, whole.usage.prompt_tokens
        usage = {"stream_options": {"include_usage": True}}
        *parts, last = client.completions.create(**options, **usage, stream=True)  # type: ignore[call-overload]
        return "".join(part.choices[0].text for part in parts), last.usage.prompt_tokens

    for prompt, num_tokens in [(PROMPT, 5), (BOS + PROMPT, 6)]:
        assert complete(prompt) == (generate(fleet, text=prompt)[0], num_tokens)


def test_several_prompts_are_each_completed(fleet: Fleet, client: openai.OpenAI) -> None:
    prompts = [PROMPT, "There was a little girl"]
    answered = client.completions.create(model=MODEL, prompt=prompts, max_tokens=24, seed=SEED)
    assert [one.text for one in answered.choices] == [generate(fleet, text=prompt)[0] for prompt in prompts]


def test_token_ids_equal_generation_service(fleet: Fleet) -> None:
    """Of SMG's APIs only /generate tells ids, and it takes no seed."""
    body = {"text": BOS + PROMPT, "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    (through_gateway,) = post_json(f"{fleet.url}/generate", {"model": MODEL, **body})
    assert through_gateway["output_ids"] == generate(fleet, temperature=0, text=PROMPT)[1]


def test_responses(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "input": PROMPT, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**options)  # type: ignore[call-overload]
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 8)
    assert whole.output_text
    events = list(client.responses.create(**options, stream=True))  # type: ignore[call-overload]
    assert [event.type for event in events].count("response.output_text.delta") > 1
    assert events[-1].type == "response.incomplete"


def test_stop_strings_end_answers(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=["."], temperature=0)
    assert whole.choices[0].finish_reason == "stop"
    assert "." not in str(whole.choices[0].message.content)


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"min_p": 0.5},
    ],
    ids=str,
)
def test_processors_change_answers(fleet: Fleet, client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """Ranks serve them: the executables pick tokens, and were compiled without processors."""
    answered = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, seed=SEED, extra_body=asked)
    assert answered.choices[0].text == generate(fleet, text=PROMPT, sampling=asked)[0]
    assert answered.choices[0].text != generate(fleet, text=PROMPT)[0]


def test_what_kiln_does_not_serve_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True)
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.chat.completions.create(model="nothing", messages=MESSAGES)


def test_anthropic_client(fleet: Fleet) -> None:
    # Its thousand modules take two seconds, which each worker that collects this file would spend.
    import anthropic  # noqa: PLC0415

    with anthropic.Anthropic(base_url=fleet.url, api_key="none", max_retries=0) as client:
        options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**options)  # type: ignore[call-overload]
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
        with client.messages.stream(**options) as stream:  # type: ignore[arg-type]
            parts = list(stream.text_stream)
            assert stream.get_final_message().stop_reason == "max_tokens"
        assert "".join(parts) == whole.content[0].text
        assert len(parts) > 1


@pytest.mark.slow
def test_npm_client(fleet: Fleet) -> None:
    require_tool("node", oldest="20.9")
    require_tool("npm")
    subprocess.run(["npm", "run", "--silent", "setup"], cwd=NODE, check=True, timeout=280)
    # Of a program on its standard input, node looks for packages in the current directory.
    result = subprocess.run(
        ["node", "--input-type=module", "-", MODEL, str(SEED)],
        input=Path(__file__).with_name("stream.mjs").read_text(),
        cwd=NODE,
        env=os.environ | {"OPENAI_BASE_URL": f"{fleet.url}/v1", "OPENAI_API_KEY": "none", "no_proxy": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["streamed"] == printed["whole"] == chat(fleet)
    assert printed["chunks"] > 1


def test_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (NODE / "package-lock.json").read_text()
