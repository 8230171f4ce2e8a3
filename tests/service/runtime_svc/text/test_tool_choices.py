"""Choices of tools, from the request to calls, and what of them is refused before the request takes a slot."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from tests.bundles.manifests import DYNAMIC
from tests.checkpoints.family_chats import FAMILY_CHATS
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}
TOOL = json.dumps({"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}})
REQUIRED = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, parallel_calls=False)
BUNDLE: dict[str, Any] = {
    "chat_template": FAMILY_CHATS["qwen-2.5"],
    "chat_templates": {"plain": "{{ messages[0].content }}", "mistral": FAMILY_CHATS["mistral"]},
    "prompt_buckets": (512,),
    "token_buckets": (768,),
}


@pytest.fixture
async def calling(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime whose deployment picks tokens on the host, with templates that write calls and one that does not."""
    async with serve_runtime(tmp_path) as served:
        sampling = msgspec.structs.replace(DYNAMIC, mode="host")
        await served.deploy(sampling=sampling, **BUNDLE)
        yield served


def ask(choice: pb.ToolChoice, *tools: str, template: str = "", **options: Any) -> pb.GenerateRequest:
    turn = pb.ChatMessage(role="user", content="a")
    chat = pb.Chat(messages=[turn], tools_json=tools or [TOOL], chat_template=template, add_generation_prompt=False)
    return pb.GenerateRequest(deployment_id="d", chat=chat, tool_choice=choice, **options)


async def write(served: Runtime, request: pb.GenerateRequest) -> str:
    events = await served.ask(request)
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN, events[-1]
    return "".join(event.delta.text for event in events)


def tool(**function: Any) -> str:
    return json.dumps({"type": "function", "function": {"name": "find", "parameters": SCHEMA} | function})


async def test_a_required_call_validates(calling: Runtime) -> None:
    text = await write(calling, ask(REQUIRED))
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call["name"] == "find"
    jsonschema.validate(call["arguments"], SCHEMA)
    text = await write(calling, ask(pb.ToolChoice(function="other"), TOOL, tool(name="other"), template="mistral"))
    (call,) = json.loads(text.removeprefix("[TOOL_CALLS] "))
    assert call["name"] == "other"
    jsonschema.validate(call["arguments"], SCHEMA)


async def test_a_template_that_writes_no_calls_is_named(calling: Runtime) -> None:
    for mode in (pb.ToolChoice.MODE_AUTO, pb.ToolChoice.MODE_NONE, pb.ToolChoice.MODE_REQUIRED):
        call = calling.generation.Generate(ask(pb.ToolChoice(mode=mode), template="plain"))
        refusal = await refused(call, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", "tool_choice")
        assert "which are tags, list, named" in refusal.fields["tool_choice"]


@pytest.mark.parametrize("choice", [pb.ToolChoice(), pb.ToolChoice(parallel_calls=True)], ids=["nothing", "several"])
async def test_what_chooses_nothing_changes_nothing(calling: Runtime, choice: pb.ToolChoice) -> None:
    """It is no constraint, also for a template that writes no calls."""
    stop = pb.StopConditions(max_new_tokens=8)
    free = ask(choice, stop=stop)
    free.ClearField("tool_choice")
    expected = tokens_of(await calling.ask(free))
    assert len(expected) == 8
    assert tokens_of(await calling.ask(ask(choice, stop=stop))) == expected
    await calling.ask(ask(choice, template="plain", stop=stop))


async def test_a_second_call_is_forbidden_without_a_choice(calling: Runtime) -> None:
    call = calling.generation.Generate(ask(pb.ToolChoice(parallel_calls=False), template="plain"))
    await refused(call, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", "tool_choice")


@pytest.mark.parametrize(
    ("request_", "violations"),
    [
        (ask(pb.ToolChoice(function="lost")), {"tool_choice.function": "got 'lost'; accepted: one of find"}),
        (ask(pb.ToolChoice(mode=9)), {"tool_choice.mode": "got 9; accepted: one of AUTO"}),  # type: ignore[arg-type]
        (ask(REQUIRED, "[1]"), {"chat.tools_json[0]": "one JSON object"}),
        (ask(REQUIRED, TOOL, "{}"), {"chat.tools_json[1]": "a function with a `name`"}),
        (ask(REQUIRED, TOOL, TOOL), {"chat.tools_json[1]": "a `name` of its own"}),
        (ask(REQUIRED, tool(name="")), {"chat.tools_json[0]": ""}),
        (ask(REQUIRED, tool(parameters=[])), {"chat.tools_json[0]": ""}),
        (ask(REQUIRED, tool(parameters={"type": "string"})), {"chat.tools_json[0]": "a schema of objects"}),
        (ask(REQUIRED, '{"function": "find"}'), {"chat.tools_json[0]": ""}),
        (ask(REQUIRED, TOOL, tool(name="b", parameters={"not": {}})), {"chat.tools_json[1]": "can be kept: "}),
        (ask(REQUIRED, constraint=pb.OutputConstraint(json_object=True)), {"tool_choice": "unset, beside constraint"}),
        (ask(REQUIRED, stop=pb.StopConditions(ignore_eos=True)), {"stop.ignore_eos": "beside tool_choice"}),
        (
            ask(REQUIRED, sampling=pb.SamplingParams(forced_token_ids=[5])),
            {"sampling.forced_token_ids": "beside tool_choice"},
        ),
        (
            pb.GenerateRequest(deployment_id="d", text="a", tool_choice=REQUIRED),
            {"tool_choice": "got REQUIRED; accepted: unset: the prompt is no chat with tools_json"},
        ),
    ],
)
async def test_what_is_wrong_is_named(
    calling: Runtime, request_: pb.GenerateRequest, violations: dict[str, str]
) -> None:
    refusal = await refused(calling.generation.Generate(request_), "INVALID_ARGUMENT", "REQUEST_INVALID", *violations)
    for field, text in violations.items():
        assert text in refusal.fields[field]


async def test_a_bundle_without_constraints_has_no_choices(served: Runtime) -> None:
    await served.deploy(**BUNDLE, flags=("noise_keys", "sampling_params", "tokens"))
    refusal = await refused(
        served.generation.Generate(ask(REQUIRED)), "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", "tool_choice"
    )
    assert "neuron_config.logit_processors" in refusal.fields["tool_choice"]
