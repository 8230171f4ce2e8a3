"""What the data plane refuses, over loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kiln.runtime.v1 import generation_pb2 as pb

from runtime_svc import admission
from tests.hang_guard import HANG_S
from tests.ranks.fakes import GREEDY, VOCAB_SIZE, expected_tokens
from tests.servers.runtime import Runtime, details_of, fields_of, raises, serve_runtime, token_request, tokens_of


async def test_every_mistake_is_named_at_once(served: Runtime) -> None:
    await served.deploy()
    request = pb.GenerateRequest(
        deployment_id="d",
        request_id="x" * 129,
        token_ids=pb.TokenIds(ids=[5, -1, VOCAB_SIZE]),
        sampling=pb.SamplingParams(temperature=-1, top_k=51, top_p=0),
        stop=pb.StopConditions(max_new_tokens=0, stop_strings=["", "x" * 257, "fine"], stop_token_ids=[3, VOCAB_SIZE]),
        output=pb.OutputOptions(logprobs=21),
    )
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await anext(aiter(served.generation.Generate(request)))
    assert fields_of(caught[0]) == [
        "request_id",
        "token_ids.ids[1]",
        "token_ids.ids[2]",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "stop.max_new_tokens",
        "stop.stop_strings[0]",
        "stop.stop_strings[1]",
        "stop.stop_token_ids[1]",
        "output.logprobs",
    ]
    violations = {one.field: one.description for one in details_of(caught[0])[1].field_violations}
    assert violations["sampling.temperature"] == "got -1; accepted: a number of at least 0"
    assert violations["token_ids.ids[2]"] == f"got {VOCAB_SIZE}; accepted: 0 to {VOCAB_SIZE - 1}"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "text"),
        ({"chat": pb.Chat()}, "chat.messages"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(content="x")])}, "chat.messages[0].role"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(role="tyrant", content="x")])}, "chat"),
        ({"token_ids": pb.TokenIds()}, "token_ids.ids"),
        ({"text": "x", "sampling": pb.SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"text": "x", "sampling": pb.SamplingParams(temperature=float("inf"))}, "sampling.temperature"),
        ({"text": "x", "sampling": pb.SamplingParams(top_p=float("nan"))}, "sampling.top_p"),
        ({"text": "x", "sampling": pb.SamplingParams(top_p=1.5)}, "sampling.top_p"),
        ({"text": "x", "sampling": pb.SamplingParams(top_k=-2)}, "sampling.top_k"),
        ({"text": "x", "stop": pb.StopConditions(stop_strings=["y"] * 17)}, "stop.stop_strings"),
        ({"text": "x", "output": pb.OutputOptions(logprobs=-1)}, "output.logprobs"),
    ],
)
async def test_single_mistakes(served: Runtime, options: dict[str, Any], field: str) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await anext(aiter(served.generation.Generate(pb.GenerateRequest(deployment_id="d", **options))))
    assert fields_of(caught[0]) == [field]


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_no_limit_of_candidates(served: Runtime, top_k: int) -> None:
    """As configurations take it, and clients of other servers send it."""
    await served.deploy()
    events = await served.generate([5, 6], 3, temperature=0.0, top_k=top_k)
    assert events[0].accepted.sampling.top_k == 0
    assert tokens_of(events) == expected_tokens([5, 6], 3)


UNSERVED: list[tuple[str, dict[str, Any], str]] = [
    ("sampling.min_p", {"sampling": pb.SamplingParams(min_p=0.1)}, "got 0.1; accepted: unset or 0.0"),
    ("sampling.frequency_penalty", {"sampling": pb.SamplingParams(frequency_penalty=1)}, "got 1; accepted: unset or 0"),
    ("sampling.presence_penalty", {"sampling": pb.SamplingParams(presence_penalty=-2)}, "got -2; accepted: unset or 0"),
    (
        "sampling.repetition_penalty",
        {"sampling": pb.SamplingParams(repetition_penalty=1.5)},
        "got 1.5; accepted: unset or 1",
    ),
    ("sampling.logit_bias", {"sampling": pb.SamplingParams(logit_bias={5: 0})}, "got set; accepted: unset"),
    ("constraint", {"constraint": pb.OutputConstraint(json_schema="{}")}, "got set; accepted: unset"),
    ("priority", {"priority": -1}, "got -1; accepted: unset or 0"),
    ("adapter", {"adapter": "sql"}, "got 'sql'; accepted: unset"),
]


def test_every_field_that_is_not_served_has_a_case() -> None:
    assert [path for path, *_ in UNSERVED] == list(admission.UNSERVED)


@pytest.mark.parametrize(("path", "options", "description"), UNSERVED, ids=[path for path, *_ in UNSERVED])
async def test_field_that_is_not_served_yet_is_named(
    served: Runtime, path: str, options: dict[str, Any], description: str
) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await served.generation.Generate(pb.GenerateRequest(deployment_id="d", text="x", **options)).read()
    (violation,) = details_of(caught[0])[1].field_violations
    assert violation.field == path
    assert violation.description.startswith(description)
    assert violation.description.endswith("this server does not serve it yet")


async def test_values_that_change_nothing_are_taken(served: Runtime) -> None:
    await served.deploy()
    neutral = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    request = token_request([5], 3)
    request.MergeFrom(pb.GenerateRequest(sampling=pb.SamplingParams(**neutral), num_sequences=1, priority=0))  # type: ignore[arg-type]
    assert tokens_of([event async for event in served.generation.Generate(request)]) == expected_tokens([5], 3)


def turn(**fields: Any) -> dict[str, Any]:
    return {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="x"), pb.ChatMessage(role="user", **fields)])}


@pytest.mark.parametrize(
    ("options", "reason", "field"),
    [
        (
            turn(content="x", content_parts=[pb.ContentPart(text="y")]),
            "REQUEST_INVALID",
            "chat.messages[1].content_parts",
        ),
        (turn(content_parts=[pb.ContentPart()]), "REQUEST_INVALID", "chat.messages[1].content_parts[0]"),
        (
            turn(content_parts=[pb.ContentPart(text="y"), pb.ContentPart(image=pb.Media(url="http://x"))]),
            "FEATURE_NOT_SERVED",
            "chat.messages[1].content_parts[1].image",
        ),
        (
            turn(content_parts=[pb.ContentPart(audio={})]),
            "FEATURE_NOT_SERVED",
            "chat.messages[1].content_parts[0].audio",
        ),
        (turn(tool_calls=[pb.ToolCall(id="1")]), "REQUEST_INVALID", "chat.messages[1].tool_calls[0].name"),
        (
            turn(tool_calls=[pb.ToolCall(name="f", arguments_json="[]")]),
            "REQUEST_INVALID",
            "chat.messages[1].tool_calls[0].arguments_json",
        ),
    ],
)
async def test_turns_that_no_template_can_render(
    served: Runtime, options: dict[str, Any], reason: str, field: str
) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", reason) as caught:
        await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", **options))
    assert fields_of(caught[0]) == [field]


async def test_template_that_refuses_says_why(served: Runtime) -> None:
    await served.deploy()
    chat = pb.Chat(messages=[pb.ChatMessage(role="tyrant", content="x")])
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", chat=chat))
    assert "no tyrants" in details_of(caught[0])[1].field_violations[0].description


async def test_prompt_that_is_too_long_names_length_and_limit(served: Runtime) -> None:
    await served.deploy()
    assert tokens_of(await served.generate([5] * 16, 1)) == expected_tokens([5] * 16, 1)
    async with raises("INVALID_ARGUMENT", "PROMPT_TOO_LONG") as caught:
        await served.generate([5] * 17)
    info, bad_request = details_of(caught[0])
    assert (info.metadata["num_tokens"], info.metadata["max_tokens"]) == ("17", "16")
    assert bad_request.field_violations[0].field == "token_ids"
    async with raises("INVALID_ARGUMENT", "PROMPT_TOO_LONG"):
        await anext(aiter(served.generation.Generate(pb.GenerateRequest(deployment_id="d", text="long " * 100))))


async def test_prompt_must_leave_room_for_one_token(served: Runtime) -> None:
    deployment = await served.deploy(prompt_buckets=(64,), token_buckets=(64,))
    assert deployment.capabilities.max_context_length == 63
    assert tokens_of(await served.generate([5] * 63, None)) == expected_tokens([5] * 63, 1)
    async with raises("INVALID_ARGUMENT", "PROMPT_TOO_LONG"):
        await served.generate([5] * 64)


async def test_baked_sampling_refuses_other_values_by_name(served: Runtime) -> None:
    await served.deploy(sampling=GREEDY, flags=("tokens",))
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        request = token_request([5], temperature=0.7, top_k=5, top_p=1.0)
        request.output.logprobs = 0
        await anext(aiter(served.generation.Generate(request)))
    assert fields_of(caught[0]) == ["output.logprobs", "sampling.temperature", "sampling.top_k"]
    assert "output_logits: true" in details_of(caught[0])[1].field_violations[0].description
    for same in ({}, {"top_k": 1}, {"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0}):
        assert tokens_of(await served.generate([5], **same)) == expected_tokens([5], 5)


async def test_bundle_without_tokenizer_takes_token_ids_only(served: Runtime) -> None:
    deployment = await served.deploy(tokenizer=None)
    assert not deployment.capabilities.chat
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    for request in (
        pb.GenerateRequest(deployment_id="d", text="x"),
        pb.GenerateRequest(deployment_id="d", chat=chat),
        pb.GenerateRequest(
            deployment_id="d", token_ids=pb.TokenIds(ids=[5]), stop=pb.StopConditions(stop_strings=["x"])
        ),
    ):
        async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED"):
            await anext(aiter(served.generation.Generate(request)))
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED"):
        await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", text="x"))
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED"):
        await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="d", token_ids=[5]))


async def test_bundle_without_template_takes_no_chat(served: Runtime) -> None:
    await served.deploy(chat_template=None)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", chat=chat))
    assert fields_of(caught[0]) == ["chat"]


async def test_a_chat_template_that_the_bundle_lacks_is_named(served: Runtime) -> None:
    await served.deploy(chat_template=None, chat_templates={"rag": "a", "tool_use": "b"})
    message = pb.ChatMessage(role="user", content="x")
    for chat, given in (
        (pb.Chat(messages=[message], chat_template="unknown"), "'unknown'"),
        (pb.Chat(messages=[message]), "none, and the bundle has no default"),
    ):
        async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
            await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", chat=chat))
        assert fields_of(caught[0]) == ["chat.chat_template"]
        assert f"got {given}; accepted: one of rag, tool_use" in str(caught[0].details())


async def test_detokenize_names_ids_outside_the_vocabulary(served: Runtime) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="d", token_ids=[5, VOCAB_SIZE]))
    assert fields_of(caught[0]) == ["token_ids[1]"]


async def test_unknown_deployment(served: Runtime) -> None:
    calls = [
        anext(aiter(served.generation.Generate(token_request([5], deployment_id="nobody")))),
        served.generation.Abort(pb.AbortRequest(deployment_id="nobody", request_id="x")),
        served.generation.Tokenize(pb.TokenizeRequest(deployment_id="nobody", text="x")),
        served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="nobody")),
    ]
    for call in calls:
        async with raises("NOT_FOUND", "DEPLOYMENT_NOT_FOUND") as caught:
            await call
        assert details_of(caught[0])[0].metadata["deployment_id"] == "nobody"


async def test_deployment_that_still_loads_is_not_ready(served: Runtime) -> None:
    served.load_gate.clear()
    served.publish()
    load = asyncio.create_task(served.load("story"))
    async with asyncio.timeout(HANG_S):
        while not served.groups:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY") as caught:
        await served.generate([5])
    assert details_of(caught[0])[0].metadata["state"] == "LOADING"
    served.load_gate.set()
    await load
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_request_id_in_use(served: Runtime) -> None:
    await served.deploy()
    served.ranks.gate.clear()
    call = served.generation.Generate(token_request([5], request_id="same"))
    await anext(aiter(call))
    async with raises("ALREADY_EXISTS", "REQUEST_ID_IN_USE"):
        await served.generate([5], request_id="same")
    served.ranks.gate.set()
    async for _ in call:
        pass
    await served.generate([5], request_id="same")


async def test_full_queue_says_when_to_retry(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--queue-capacity=2") as served:
        await served.deploy(num_slots=1)
        served.ranks.gate.clear()
        calls = [served.generation.Generate(token_request([5], 3)) for _ in range(3)]
        for call in calls:
            await anext(aiter(call))
        load = (await served.get()).load
        assert (load.queued_requests, load.queued_tokens) == (2, 2)
        async with raises("RESOURCE_EXHAUSTED", "QUEUE_FULL") as caught:
            await served.generate([5])
        status = rpc_status.from_call(caught[0])
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToNanoseconds() > 0
        served.ranks.gate.set()
        for call in calls:
            assert tokens_of([event async for event in call]) == expected_tokens([5], 3)
