"""vLLM's engine API over loopback, by the stubs that routers have, beside GenerationService."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import generation_pb2 as generation
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from structlog.testing import capture_logs

import runtime_svc.server
from edge.errors import OptionsInvalid
from runtime_svc.server import ENGINE_SERVICE
from tests.bundles.published import CHAT_TEMPLATE, TOKENIZER_JSON
from tests.ranks.fakes import EOS, GREEDY, VOCAB_SIZE, expected_tokens
from tests.servers.runtime import Runtime, fields_of, raises, serve_runtime, text_of, token_request, tokens_of


def stub_of(served: Runtime) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


def make_request(
    prompt: Sequence[int], *, stream: bool = True, request_id: str = "", max_tokens: int | None = 5, **params: Any
) -> pb.GenerateRequest:
    """A request as SMG writes them: it fills in the neutral values."""
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "skip_special_tokens": True}
    sampling = pb.SamplingParams(max_tokens=max_tokens, **(neutral | {"ignore_eos": True} | params))
    tokenized = pb.TokenizedInput(original_text="not read", input_ids=prompt)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=sampling, stream=stream)


async def call(served: Runtime, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub_of(served).Generate(request)]


async def complete(served: Runtime, prompt: Sequence[int], **options: Any) -> pb.GenerateComplete:
    """The only message of a call that does not stream."""
    (only,) = await call(served, make_request(prompt, stream=False, **options))
    return only.complete


async def health_of(served: Runtime) -> tuple[bool, str]:
    """What both health services say of the API; a healthy one says so in both."""
    response = await stub_of(served).HealthCheck(pb.HealthCheckRequest())
    standard = await health_pb2_grpc.HealthStub(served.channel).Check(
        health_pb2.HealthCheckRequest(service=ENGINE_SERVICE)
    )
    assert (standard.status == health_pb2.HealthCheckResponse.SERVING) is response.healthy
    return response.healthy, response.message


async def test_a_stream_has_the_tokens_of_generation_service(served: Runtime) -> None:
    await served.deploy()
    theirs = tokens_of(await served.generate([5, 6], 7, temperature=0.5, seed=11))
    *chunks, last = await call(served, make_request([5, 6], max_tokens=7, temperature=0.5, seed=11))
    assert [list(one.chunk.token_ids) for one in chunks] == [[token] for token in theirs]
    assert {(one.chunk.prompt_tokens, one.chunk.completion_tokens) for one in chunks} == {(2, 1)}
    assert list(last.complete.output_ids) == theirs == expected_tokens([5, 6], 7, seed=11)
    usage = last.complete.prompt_tokens, last.complete.completion_tokens, last.complete.cached_tokens
    assert (last.complete.finish_reason, usage) == ("length", (2, 7, 0))
    assert last.complete.WhichOneof("matched_stop") is None
    assert not last.complete.HasField("output_logprobs")


async def test_without_stream_one_message_has_everything(served: Runtime) -> None:
    await served.deploy()
    answer = await complete(served, [5, 6])
    assert list(answer.output_ids) == expected_tokens([5, 6], 5)
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == ("length", 2, 5)


async def test_text_becomes_the_tokens_of_generation_service(served: Runtime) -> None:
    await served.deploy()
    request = pb.GenerateRequest(text="a cat", sampling_params=pb.SamplingParams(max_tokens=4))
    theirs = generation.GenerateRequest(
        deployment_id="d", text="a cat", stop=generation.StopConditions(max_new_tokens=4)
    )
    events = [event async for event in served.generation.Generate(theirs)]
    (answer,) = await call(served, request)
    assert list(answer.complete.output_ids) == tokens_of(events)
    assert answer.complete.prompt_tokens == events[0].accepted.prompt_token_count


async def test_logprobs_are_those_of_generation_service(served: Runtime) -> None:
    await served.deploy()
    request = token_request([5], 3)
    request.output.logprobs = 2
    theirs = [token async for event in served.generation.Generate(request) for token in event.delta.tokens]
    *chunks, last = await call(served, make_request([5], max_tokens=3, logprobs=2))
    for message, tokens in [
        *((one.chunk.output_logprobs, [token]) for one, token in zip(chunks, theirs, strict=True)),
        (last.complete.output_logprobs, theirs),
    ]:
        assert list(message.token_ids) == [token.id for token in tokens]
        assert list(message.token_logprobs) == [token.logprob for token in tokens]
        assert [list(top.token_ids) for top in message.top_logprobs] == [
            [other.id for other in token.top_logprobs] for token in tokens
        ]
        assert [list(top.values) for top in message.top_logprobs] == [
            [other.logprob for other in token.top_logprobs] for token in tokens
        ]
        assert all(len(top.values) == 2 for top in message.top_logprobs)
    alone = (await complete(served, [5], logprobs=0)).output_logprobs
    assert (len(alone.token_logprobs), len(alone.top_logprobs)) == (5, 0)


async def test_a_stop_that_the_request_asked_for_is_named(served: Runtime) -> None:
    await served.deploy()
    whole = await served.generate([5], 40)
    stop = text_of(whole)[12:15]
    answer = await complete(served, [5], max_tokens=40, stop=[stop])
    assert (answer.finish_reason, answer.matched_stop_str) == ("stop", stop)
    tokens = tokens_of(whole)
    assert 0 < len(answer.output_ids) < len(tokens)
    assert list(answer.output_ids) == tokens[: len(answer.output_ids)]
    answer = await complete(served, [5], stop_token_ids=[tokens[2]])
    assert (answer.finish_reason, answer.matched_token_id) == ("stop", tokens[2])
    assert list(answer.output_ids) == tokens[: tokens.index(tokens[2]) + 1]


async def test_the_models_own_end_is_a_stop_without_a_match(served: Runtime) -> None:
    await served.deploy()
    assert expected_tokens([5, 505], 1) == [EOS]
    answer = await complete(served, [5, 505], ignore_eos=False)
    assert (answer.finish_reason, answer.WhichOneof("matched_stop")) == ("stop", None)
    assert list(answer.output_ids) == [EOS]


async def test_an_abort_frees_the_slot_and_is_an_answer(served: Runtime) -> None:
    await served.deploy()
    served.ranks.gate.clear()
    running = asyncio.create_task(call(served, make_request([5], max_tokens=40, request_id="mine")))
    await served.wait_for_slots(1)
    await stub_of(served).Abort(pb.AbortRequest(request_ids=["none", "mine"]))
    assert (await served.get()).load.used_slots == 0
    served.ranks.gate.set()
    last = (await running)[-1].complete
    assert (last.finish_reason, list(last.output_ids)) == ("abort", [])
    await stub_of(served).Abort(pb.AbortRequest(request_ids=["mine"]))


async def test_a_request_that_others_end_is_an_error(served: Runtime) -> None:
    await served.deploy()
    served.ranks.gate.clear()
    running = asyncio.create_task(call(served, make_request([5], max_tokens=40)))
    await served.wait_for_slots(1)
    unload = asyncio.create_task(served.unload())
    async with raises("ABORTED", "REQUEST_ABORTED"):
        await running
    served.ranks.gate.set()
    await unload


async def test_a_client_that_leaves_frees_the_slot(served: Runtime) -> None:
    await served.deploy()
    # Left alone, the sequence would run for eight seconds.
    served.ranks.step_s = 0.2
    running = stub_of(served).Generate(make_request([5], max_tokens=40))
    await anext(aiter(running))
    running.cancel()
    await served.wait_for_slots(0)


async def test_the_log_says_what_became_of_a_sequence(served: Runtime) -> None:
    await served.deploy()
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        await complete(served, [5, 6], request_id="mine")
    (line,) = [log for log in logs if log.get("method", "").endswith("VllmEngine/Generate")]
    assert (line["deployment_id"], line["request_id"], line["code"]) == ("d", "mine", "OK")
    assert (line["finish_reason"], line["prompt_tokens"], line["generated_tokens"]) == ("LENGTH", 2, 5)


async def test_the_request_id_is_the_clients(served: Runtime) -> None:
    await served.deploy()
    running = stub_of(served).Generate(make_request([5], request_id="cmpl-1"))
    assert [response async for response in running]
    assert ("x-request-id", "cmpl-1") in tuple(await running.trailing_metadata())


async def test_a_deadline_ends_the_sequence_with_an_error_of_kiln(served: Runtime) -> None:
    await served.deploy()
    served.ranks.step_s = 0.01
    chunks = []
    async with raises("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"):
        async for response in stub_of(served).Generate(make_request([5], max_tokens=60), timeout=0.3):
            chunks.append(response)  # noqa: PERF401
    assert {response.WhichOneof("response") for response in chunks} == {"chunk"}
    assert (await served.get()).load.used_slots == 0


async def test_what_kiln_does_not_do_is_refused_by_name(served: Runtime) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await complete(served, [5], n=2, min_p=0.5, json_schema="{}")
    assert set(fields_of(caught[0])) == {
        "sampling_params.n",
        "sampling_params.min_p",
        "sampling_params.json_schema",
    }
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await complete(served, [5, VOCAB_SIZE], temperature=-1.0, max_tokens=0)
    assert fields_of(caught[0]) == [
        "tokenized.input_ids[1]",
        "sampling_params.temperature",
        "sampling_params.max_tokens",
    ]
    async with raises("INVALID_ARGUMENT", "PROMPT_TOO_LONG") as caught:
        await complete(served, [5] * 17)
    assert fields_of(caught[0]) == ["tokenized.input_ids"]


async def test_neutral_values_and_advertised_ones_suit_sampling_that_is_compiled_in(served: Runtime) -> None:
    await served.deploy(sampling=GREEDY, flags=("tokens",))
    greedy = expected_tokens([5], 5)
    assert list((await complete(served, [5])).output_ids) == greedy
    # SMG sends what the model info names wherever its client sets nothing.
    info = await stub_of(served).GetModelInfo(pb.GetModelInfoRequest())
    named = json.loads(info.default_sampling_params_json)
    assert named == {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    assert list((await complete(served, [5], **named)).output_ids) == greedy
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await complete(served, [5], temperature=0.7, top_k=9)
    assert fields_of(caught[0]) == ["sampling_params.temperature", "sampling_params.top_k"]


async def test_one_of_two_deployments_must_be_named(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_CHOSEN"):
            await complete(served, [5])
        await served.deploy("a")
        await served.deploy("b", ref="other", bias=4)
        for method, request in [
            ("GetModelInfo", pb.GetModelInfoRequest()),
            ("GetServerInfo", pb.GetServerInfoRequest()),
            ("GetLoads", pb.GetLoadsRequest()),
            ("Abort", pb.AbortRequest()),
        ]:
            async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_CHOSEN"):
                await getattr(stub_of(served), method)(request)
        async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_CHOSEN") as caught:
            await complete(served, [5])
        assert "several serve: a, b; --engine-deployment" in str(caught[0].details())
        assert (await health_of(served))[0] is False
        await served.unload("a")
        assert list((await complete(served, [5])).output_ids) == expected_tokens([5], 5, bias=4)


async def test_the_named_deployment_answers(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--engine-deployment=b") as served:
        await served.deploy("a")
        async with raises("NOT_FOUND", "DEPLOYMENT_NOT_FOUND"):
            await complete(served, [5])
        assert await health_of(served) == (False, "no deployment 'b'")
        await served.deploy("b", ref="other", bias=4)
        assert list((await complete(served, [5])).output_ids) == expected_tokens([5], 5, bias=4)
        assert (await stub_of(served).GetModelInfo(pb.GetModelInfoRequest())).served_model_name == "b"
        assert await health_of(served) == (True, "deployment 'b' is READY")


async def test_health_is_that_of_the_deployment(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--drain-timeout=5") as served:
        assert await health_of(served) == (False, "this API names no deployment, and none serves")
        await served.deploy()
        assert await health_of(served) == (True, "deployment 'd' is READY")
        served.load_gate.clear()
        served.ranks.die()
        await served.wait_for_state("RECOVERING")
        assert await health_of(served) == (False, "deployment 'd' is RECOVERING")
        served.load_gate.set()
        await served.wait_for_state("READY")
        assert (await health_of(served))[0] is True
        served.ranks.step_s = 0.02
        running = stub_of(served).Generate(make_request([5], max_tokens=40))
        await anext(aiter(running))
        drain = asyncio.create_task(served.server.drain())
        await asyncio.sleep(0.05)
        for request in (stub_of(served).HealthCheck(pb.HealthCheckRequest()), complete(served, [5])):
            async with raises("UNAVAILABLE", "SHUTTING_DOWN"):
                await request
        assert [response async for response in running][-1].complete.finish_reason == "length"
        await drain


async def test_model_info_describes_the_deployment(served: Runtime) -> None:
    digest = served.publish()
    await served.deploy()
    info = await stub_of(served).GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model_path=digest,
        tokenizer_path=digest,
        served_model_name="d",
        is_generation=True,
        max_context_length=64,
        max_req_input_len=16,
        vocab_size=VOCAB_SIZE,
        architectures=["Test"],
        eos_token_ids=[EOS],
        bos_token_id=1,
        default_sampling_params_json='{"temperature": 0.0, "top_k": 0, "top_p": 1.0}',
    )


async def test_loads_and_server_info_count_requests(served: Runtime) -> None:
    await served.deploy()
    stub = stub_of(served)
    served.ranks.step_s = 0.02
    running = [asyncio.create_task(call(served, make_request([5, 6], max_tokens=40))) for _ in range(6)]
    await served.wait_for_slots(4)
    served.ranks.gate.clear()
    load = (await stub.GetLoads(pb.GetLoadsRequest())).loads[0]
    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (4, 2, 4)
    assert (load.token_usage, load.utilization, load.max_total_num_tokens) == (1.0, 1.0, 4 * 64)
    assert load.num_waiting_uncached_tokens == 4
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.active_requests, info.is_paused) == ("kiln", 6, False)
    assert (info.max_num_seqs, info.block_size, info.data_parallel_size) == (4, 64, 1)
    assert info.kv_cache_dtype == "float32"
    served.ranks.gate.set()
    for one in running:
        one.cancel()
    await served.wait_for_slots(0)
    loads = await stub.GetLoads(pb.GetLoadsRequest(dp_rank=0, include=["core", "queues"]))
    assert (loads.dp_rank_count, len(loads.loads), loads.loads[0].num_total_reqs) == (1, 1, 0)
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert fields_of(caught[0]) == ["dp_rank"]


async def fetch_tokenizer(served: Runtime) -> tuple[list[common_pb2.GetTokenizerChunk], bytes]:
    chunks = [chunk async for chunk in stub_of(served).GetTokenizer(common_pb2.GetTokenizerRequest())]
    return chunks, b"".join(chunk.data for chunk in chunks)


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(served: Runtime) -> None:
    # Too random to fit one message.
    template = CHAT_TEMPLATE + "{#" + random.Random(0).randbytes(100_000).hex() + "#}"
    await served.deploy(chat_template=template)
    chunks, data = await fetch_tokenizer(served)
    assert len(chunks) > 1
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}, (
            "equal tokenizers, equal bytes"
        )
    assert files == {
        "tokenizer.json": TOKENIZER_JSON,
        "chat_template.jinja": template.encode(),
        "generation_config.json": b'{"eos_token_id": [2]}',
    }
    assert (await fetch_tokenizer(served))[1] == data


async def test_a_bundle_without_a_tokenizer_has_none_to_send(served: Runtime) -> None:
    await served.deploy(tokenizer=None)
    async with raises("UNIMPLEMENTED", "METHOD_NOT_SERVED"):
        await fetch_tokenizer(served)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[5]))),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_other_methods_are_refused_by_name(served: Runtime, method: str, request_: Any) -> None:
    async with raises("UNIMPLEMENTED", "METHOD_NOT_SERVED") as caught:
        await getattr(stub_of(served), method)(request_)
    assert str(caught[0].details()).startswith(f"{method} is not served: ")


async def test_events_of_a_prefix_cache_are_refused_by_name(served: Runtime) -> None:
    async with raises("UNIMPLEMENTED", "METHOD_NOT_SERVED"):
        await anext(aiter(stub_of(served).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())))


async def test_without_the_extra_the_runtime_serves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_svc.server, "find_spec", lambda _: None)
    async with serve_runtime(tmp_path) as served:
        await served.deploy()
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(served).HealthCheck(pb.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(OptionsInvalid, match="engine-deployment: got 'd'; accepted: unset without the extra"):
        async with serve_runtime(tmp_path / "other", "--engine-deployment=d"):
            pass
