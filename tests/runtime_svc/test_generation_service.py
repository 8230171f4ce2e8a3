"""The data plane over loopback, on ranks whose tokens can be computed by hand."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kiln.runtime.v1 import generation_pb2 as pb

from bundle.manifest import Sampling
from tests.runtime_svc.conftest import (
    Runtime,
    details_of,
    details_of_status,
    fields_of,
    raises,
    serve_runtime,
    text_of,
    token_request,
    tokens_of,
)
from tests.runtime_svc.fakes import EOS, VOCAB_SIZE, expected_tokens

GREEDY = Sampling(
    mode="on_device",
    semantics="hf",
    dynamic=False,
    deterministic=False,
    global_topk=50,
    temperature=1.0,
    top_k=1,
    top_p=1.0,
)


async def test_stream_follows_the_contract(served: Runtime) -> None:
    await served.deploy()
    events = await served.generate([5, 6], 7, request_id="mine", temperature=0.5, top_k=9, seed=11)
    assert [event.sequence_number for event in events] == list(range(9))
    assert [event.WhichOneof("event") for event in events] == ["accepted"] + ["delta"] * 7 + ["finished"]
    assert {event.weight_epoch for event in events} == {1}
    accepted = events[0].accepted
    assert (accepted.request_id, accepted.prompt_token_count, accepted.max_new_tokens) == ("mine", 2, 7)
    sampling = accepted.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 9, 1.0, 11)
    assert all(sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "seed"))
    assert tokens_of(events) == expected_tokens([5, 6], 7, seed=11)
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert not finished.HasField("status")
    assert finished.WhichOneof("matched_stop") is None
    usage = finished.usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.generated_tokens) == (2, 0, 7)
    buckets = [(one.submodel, list(one.bucket), one.steps, one.padding_tokens) for one in usage.buckets]
    assert buckets == [("context_encoding", [8], 1, 6), ("token_generation", [16], 6, 0)]
    for duration in (usage.queue_duration, usage.prefill_duration, usage.decode_duration):
        assert duration.ToNanoseconds() >= 0


async def test_defaults_are_filled_in_and_seeds_made_up(served: Runtime) -> None:
    await served.deploy(max_new_tokens=6)
    first, second = [(await served.generate([5], None))[0].accepted for _ in range(2)]
    assert first.max_new_tokens == 6, "the bundle's own limit"
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id
    assert first.sampling.temperature == 0.0
    long = (await served.generate([5], 1000))[0].accepted
    assert long.max_new_tokens == 6


async def test_generation_fills_the_context_and_stops(served: Runtime) -> None:
    await served.deploy()
    events = await served.generate([5] * 16, None)
    assert events[0].accepted.max_new_tokens == 48
    assert tokens_of(events) == expected_tokens([5] * 16, 48)
    assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_text_and_chat_prompts_are_tokenized(served: Runtime) -> None:
    await served.deploy()
    text = pb.GenerateRequest(deployment_id="d", text="a cat")
    tokens = list((await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", text="a cat"))).token_ids)
    events = [event async for event in served.generation.Generate(text)]
    assert events[0].accepted.prompt_token_count == len(tokens)
    generated = tokens_of(events)
    assert generated == expected_tokens(tokens, len(generated))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = list((await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", chat=chat))).token_ids)
    detokenize = pb.DetokenizeRequest(deployment_id="d", token_ids=ids, skip_special_tokens=False)
    assert (await served.generation.Detokenize(detokenize)).text == "<s>hi>"
    detokenize.ClearField("skip_special_tokens")
    assert (await served.generation.Detokenize(detokenize)).text == "hi>"
    chat.add_generation_prompt = False
    tool = '{"share": 0.5, "name": "find", "count": 9007199254740993, "nested": {"b": [1.0, null], "a": true}}'
    chat.tools_json.append(tool)
    ids = list((await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", chat=chat))).token_ids)
    rendered = (await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="d", token_ids=ids))).text
    assert rendered == f"hi[{tool}]", "keys keep their order, integers their digits"


async def test_stop_string_is_not_part_of_the_text(served: Runtime) -> None:
    await served.deploy()
    whole = text_of(await served.generate([5], 40))
    stop = whole[12:15]
    request = token_request([5], 40)
    request.stop.stop_strings.append(stop)
    events = [event async for event in served.generation.Generate(request)]
    assert text_of(events) == whole[: whole.index(stop)]
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_STRING
    assert events[-1].finished.stop_string == stop


async def test_stop_tokens_of_bundle_and_request(served: Runtime) -> None:
    await served.deploy()
    # 5 + 506 + bias 1 is 512, which is 3 modulo 509; one less is the bundle's own stop token, 2.
    prompt = [5, 505]
    assert expected_tokens(prompt, 1) == [EOS]
    request = pb.GenerateRequest(deployment_id="d", token_ids=pb.TokenIds(ids=prompt))
    events = [event async for event in served.generation.Generate(request)]
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN
    assert events[-1].finished.stop_token_id == EOS
    assert events[-1].finished.usage.generated_tokens == 1
    assert text_of(events) == ""
    request.stop.ignore_eos = True
    third = expected_tokens(prompt, 3)[2]
    request.stop.stop_token_ids.append(third)
    events = [event async for event in served.generation.Generate(request)]
    assert tokens_of(events) == expected_tokens(prompt, 3)
    assert events[-1].finished.stop_token_id == third


async def test_logprobs_come_with_text_of_alternatives(served: Runtime) -> None:
    await served.deploy()
    request = token_request([5], 2)
    request.output.logprobs = 2
    events = [event async for event in served.generation.Generate(request)]
    token = events[1].delta.tokens[0]
    assert token.logprob == pytest.approx(-token.id / 10)
    assert [other.id for other in token.top_logprobs] == [token.id, token.id + 1]
    ids = pb.DetokenizeRequest(deployment_id="d", token_ids=[token.id])
    assert token.top_logprobs[0].text == token.text == (await served.generation.Detokenize(ids)).text
    request.output.ClearField("logprobs")
    events = [event async for event in served.generation.Generate(request)]
    assert not events[1].delta.tokens[0].HasField("logprob")


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
        ({"text": "x", "sampling": pb.SamplingParams(top_k=-1)}, "sampling.top_k"),
        ({"text": "x", "stop": pb.StopConditions(stop_strings=["y"] * 17)}, "stop.stop_strings"),
        ({"text": "x", "output": pb.OutputOptions(logprobs=-1)}, "output.logprobs"),
    ],
)
async def test_single_mistakes(served: Runtime, options: dict[str, Any], field: str) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await anext(aiter(served.generation.Generate(pb.GenerateRequest(deployment_id="d", **options))))
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
    async with asyncio.timeout(2):
        while not served.groups:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY") as caught:
        await served.generate([5])
    assert details_of(caught[0])[0].metadata["state"] == "LOADING"
    served.load_gate.set()
    await load
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_abort_frees_the_slot_before_it_answers(served: Runtime) -> None:
    await served.deploy()
    served.ranks.step_s = 0.005
    call = served.generation.Generate(token_request([5], 60, request_id="victim"))
    events = [await anext(aiter(call)), await anext(aiter(call))]
    abort = pb.AbortRequest(deployment_id="d", request_id="victim")
    assert (await served.generation.Abort(abort)).outcome == pb.AbortResponse.OUTCOME_ABORTED
    assert (await served.get()).load.used_slots == 0
    async with raises("ABORTED", "REQUEST_ABORTED"):
        async for event in call:
            events.append(event)  # noqa: PERF401
    finished = [event.finished for event in events if event.HasField("finished")]
    assert len(finished) == 1
    assert finished[0].reason == pb.FINISH_REASON_ABORTED
    assert details_of_status(finished[0].status)[0].reason == "REQUEST_ABORTED"
    assert finished[0].usage.generated_tokens == len(tokens_of(events))
    assert (await served.generation.Abort(abort)).outcome == pb.AbortResponse.OUTCOME_ALREADY_FINISHED


async def test_cancelled_call_frees_its_slot_within_a_step(served: Runtime) -> None:
    await served.deploy()
    served.ranks.step_s = 0.005
    call = served.generation.Generate(token_request([5], 60))
    await anext(aiter(call))
    await anext(aiter(call))
    served.ranks.gate.clear()
    call.cancel()
    # The step that is under way cannot end, and no other can begin.
    await served.wait_for_slots(0)
    num_steps = len(served.ranks.steps)
    assert num_steps < 60, "the sequence was over before its call was cancelled"
    served.ranks.gate.set()
    await asyncio.sleep(0.05)
    assert len(served.ranks.steps) == num_steps


async def test_lost_connection_frees_its_slot(served: Runtime) -> None:
    await served.deploy()
    served.ranks.gate.clear()
    channel = grpc.aio.insecure_channel(served.address)
    stub = type(served.generation)(channel)
    call = stub.Generate(token_request([5], 60))
    await anext(aiter(call))
    await served.wait_for_slots(1)
    await channel.close()
    await served.wait_for_slots(0)


async def test_deadline_ends_the_sequence_with_its_terminal_event(served: Runtime) -> None:
    await served.deploy()
    served.ranks.step_s = 0.01
    events = []
    async with raises("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"):
        async for event in served.generation.Generate(token_request([5], 60), timeout=0.3):
            events.append(event)  # noqa: PERF401
    assert events[-1].finished.reason == pb.FINISH_REASON_TIME
    assert events[-1].finished.usage.generated_tokens == len(tokens_of(events)) > 0
    assert (await served.get()).load.used_slots == 0


async def test_deadline_ends_a_waiting_request(served: Runtime) -> None:
    await served.deploy(num_slots=1)
    served.ranks.gate.clear()
    running = served.generation.Generate(token_request([5], 3))
    await anext(aiter(running))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.generation.Generate(token_request([5]), timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    served.ranks.gate.set()
    assert tokens_of([event async for event in running]) == expected_tokens([5], 3)


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
        assert (await served.get()).load.queued_requests == 2
        async with raises("RESOURCE_EXHAUSTED", "QUEUE_FULL") as caught:
            await served.generate([5])
        status = rpc_status.from_call(caught[0])
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToNanoseconds() > 0
        served.ranks.gate.set()
        for call in calls:
            assert tokens_of([event async for event in call]) == expected_tokens([5], 3)


async def test_killed_rank_ends_its_streams_and_the_next_request_works(served: Runtime) -> None:
    await served.deploy(num_slots=1)
    served.ranks.step_s = 0.005
    running = served.generation.Generate(token_request([5], 60))
    waiting = served.generation.Generate(token_request([6], 3))
    events = [await anext(aiter(running)), await anext(aiter(running))]
    killed_at_s = time.monotonic()
    served.ranks.die()
    async with raises("UNAVAILABLE", "RANK_DIED"):
        async for event in running:
            events.append(event)  # noqa: PERF401
    assert time.monotonic() - killed_at_s < 2
    assert events[-1].finished.reason == pb.FINISH_REASON_ERROR
    assert details_of_status(events[-1].finished.status)[0].reason == "RANK_DIED"
    assert tokens_of([event async for event in waiting]) == expected_tokens([6], 3)
    assert tokens_of(await served.generate([7])) == expected_tokens([7], 5)


async def test_slow_client_pauses_its_own_sequence_only(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--stream-capacity=8") as served:
        await served.deploy(token_buckets=(20_000,))
        # Otherwise gRPC itself buffers megabytes for a client that does not read.
        channel = grpc.aio.insecure_channel(served.address, options=[("grpc.http2.bdp_probe", 0)])
        slow = type(served.generation)(channel).Generate(token_request([5], 8_000))
        first = await anext(aiter(slow))
        steps, deadline_s = -1, time.monotonic() + 20
        while steps != (await served.get()).load.steps:
            assert time.monotonic() < deadline_s, "the sequence was never paused"
            steps = (await served.get()).load.steps
            await asyncio.sleep(0.2)
        assert steps < 7_000
        assert (await served.get()).load.used_slots == 1
        assert tokens_of(await served.generate([6], 40)) == expected_tokens([6], 40)
        events = [first] + [event async for event in slow]
        assert tokens_of(events) == expected_tokens([5], 8_000)
        await channel.close()


async def test_many_clients_at_once_get_their_own_tokens(served: Runtime) -> None:
    await served.deploy(num_slots=3, ctx_batch_size=2)

    async def one(index: int) -> None:
        prompt, count = [index + 3] * (index % 15 + 1), index % 30 + 1
        events = await served.generate(prompt, count, temperature=1.0, seed=index)
        assert tokens_of(events) == expected_tokens(prompt, count, seed=index)

    await asyncio.gather(*(one(index) for index in range(40)))
    assert (await served.get()).load.used_slots == 0
