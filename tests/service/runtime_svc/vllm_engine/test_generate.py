"""Generate and Abort of vLLM's engine API over loopback, beside GenerationService."""

from __future__ import annotations

import asyncio
import json

import pytest
from kiln.runtime.v1 import generation_pb2 as generation
from smg_grpc_proto import vllm_engine_pb2 as pb

from tests.ranks.fakes import EOS, GREEDY, VOCAB_SIZE, expected_tokens
from tests.servers.logs import Logs, finished_calls
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, text_of, token_request, tokens_of
from tests.servers.vllm_engine import call, complete, make_request, stub_of


async def test_a_stream_has_the_tokens_of_generation_service(served: Runtime) -> None:
    await served.deploy()
    theirs = tokens_of(await served.generate([5, 6], 7, temperature=0.5, seed=11))
    *chunks, last = await call(served, make_request([5, 6], max_tokens=7, temperature=0.5, seed=11))
    # One token a chunk, or several if this process is late to read.
    assert [token for one in chunks for token in one.chunk.token_ids] == theirs
    assert all(one.chunk.completion_tokens == len(one.chunk.token_ids) > 0 for one in chunks)
    assert {one.chunk.prompt_tokens for one in chunks} == {2}
    assert list(last.complete.output_ids) == theirs == expected_tokens([5, 6], 7, seed=11)
    usage = last.complete.prompt_tokens, last.complete.completion_tokens, last.complete.cached_tokens
    assert (last.complete.finish_reason, usage) == ("length", (2, 7, 0))
    assert last.complete.WhichOneof("matched_stop") is None
    assert not last.complete.HasField("output_logprobs")


async def test_several_sequences_are_told_apart_by_their_index(served: Runtime) -> None:
    await served.deploy()
    expected = [expected_tokens([5, 6], 7, seed=11 + index) for index in range(3)]
    options = {"max_tokens": 7, "temperature": 0.5, "seed": 11, "n": 3}
    *responses, last = await call(served, make_request([5, 6], **options))
    assert last.HasField("complete")
    for index, tokens in enumerate(expected):
        chunks = [one.chunk for one in responses if one.HasField("chunk") and one.chunk.index == index]
        assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    whole = await call(served, make_request([5, 6], stream=False, **options))
    assert {one.complete.index: list(one.complete.output_ids) for one in whole} == dict(enumerate(expected))


async def test_text_becomes_the_tokens_of_generation_service(served: Runtime) -> None:
    await served.deploy()
    request = pb.GenerateRequest(text="a cat", sampling_params=pb.SamplingParams(max_tokens=4))
    stop = generation.StopConditions(max_new_tokens=4)
    events = await served.ask(generation.GenerateRequest(deployment_id="d", text="a cat", stop=stop))
    (answer,) = await call(served, request)
    assert list(answer.complete.output_ids) == tokens_of(events)
    assert answer.complete.prompt_tokens == events[0].accepted.prompt_token_count


async def test_completions_of_smg_get_what_the_tokenizer_adds(served: Runtime) -> None:
    """SMG tells a completion's ids without them, and nothing but its request id tells them from others."""
    await served.deploy()
    tokens = await served.generation.Tokenize(generation.TokenizeRequest(deployment_id="d", text="a cat"))
    begin, *bare = tokens.token_ids
    smgs = "cmpl-4L9QSildFrVAB0WtME5Grvbf-01a2214a-8a4b-75cb-acd5-710e53d127b6"
    for request_id, prompt in [(smgs, [begin, *bare]), ("mine", bare)]:
        answer = await complete(served, bare, request_id=request_id)
        assert (answer.prompt_tokens, list(answer.output_ids)) == (len(prompt), expected_tokens(prompt, 5))
    await served.unload()
    await served.deploy(tokenizer=None)
    assert list((await complete(served, [5], request_id=smgs)).output_ids) == expected_tokens([5], 5)


async def test_logprobs_are_those_of_generation_service(served: Runtime) -> None:
    await served.deploy()
    request = token_request([5], 3)
    request.output.logprobs = 2
    theirs = [token for event in await served.ask(request) for token in event.delta.tokens]
    *chunks, last = await call(served, make_request([5], max_tokens=3, logprobs=2))
    messages = [(last.complete.output_logprobs, theirs)]
    num_read = 0
    for one in chunks:
        end = num_read + len(one.chunk.token_ids)
        messages.append((one.chunk.output_logprobs, theirs[num_read:end]))
        num_read = end
    assert num_read == len(theirs)
    for message, tokens in messages:
        assert list(message.token_ids) == [token.id for token in tokens]
        assert list(message.token_logprobs) == [token.logprob for token in tokens]
        told = [[*zip(top.token_ids, top.values, strict=True)] for top in message.top_logprobs]
        assert told == [[(other.id, other.logprob) for other in token.top_logprobs] for token in tokens]
        assert all(len(top) == 2 for top in told)
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
    assert answer.completion_tokens == len(answer.output_ids)


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
    await refused(running, "ABORTED", "REQUEST_ABORTED")
    served.ranks.gate.set()
    await unload


async def test_the_log_says_what_became_of_a_sequence_by_the_clients_id(served: Runtime, logs: Logs) -> None:
    await served.deploy()
    running = stub_of(served).Generate(make_request([5, 6], request_id="mine"))
    assert [response async for response in running]
    assert ("x-request-id", "mine") in tuple(await running.trailing_metadata())
    (line,) = await finished_calls(logs, "VllmEngine/Generate")
    assert (line["deployment_id"], line["request_id"], line["code"]) == ("d", "mine", "OK")
    assert (line["finish_reason"], line["prompt_tokens"], line["generated_tokens"]) == ("LENGTH", 2, 5)


async def test_what_kiln_does_not_do_is_refused_by_name(served: Runtime) -> None:
    await served.deploy(flags=("noise_keys", "sampling_params", "tokens"))
    for name, value in {"truncate_prompt_tokens": 2, "min_p": 0.5}.items():
        unserved = complete(served, [5], **{name: value})
        await refused(unserved, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", f"sampling_params.{name}")
    fields = ("tokenized.input_ids[1]", *(f"sampling_params.{name}" for name in ("temperature", "max_tokens", "n")))
    wrong = complete(served, [5, VOCAB_SIZE], temperature=-1.0, max_tokens=0, n=17)
    await refused(wrong, "INVALID_ARGUMENT", "REQUEST_INVALID", *fields)
    await refused(complete(served, [5] * 17), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "tokenized.input_ids")


async def test_a_deadline_is_an_error_of_kiln(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the client within the margin, or not at all: this one is ten times as long as the server's."""
    monkeypatch.setattr("runtime_svc.api.generation.DEADLINE_MARGIN_S", 0.5)
    await served.deploy()
    served.ranks.step_s = 0.05
    running = stub_of(served).Generate(make_request([5], max_tokens=60), timeout=1)
    await refused(running, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")


async def test_prompt_that_the_deployment_cannot_take_is_not_converted(
    served: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.deploy()
    monkeypatch.setattr("runtime_svc.vllm_engine.service.call_from_pb", lambda *_, **__: pytest.fail("converted"))
    await refused(complete(served, [5] * 10_000), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "tokenized.input_ids")


async def test_neutral_values_and_advertised_ones_suit_sampling_that_is_compiled_in(served: Runtime) -> None:
    await served.deploy(sampling=GREEDY, flags=("tokens",))
    greedy = expected_tokens([5], 5)
    assert list((await complete(served, [5])).output_ids) == greedy
    # SMG sends what the model info names wherever its client sets nothing.
    info = await stub_of(served).GetModelInfo(pb.GetModelInfoRequest())
    named = json.loads(info.default_sampling_params_json)
    assert named == {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    assert list((await complete(served, [5], **named)).output_ids) == greedy
    fields = ("sampling_params.temperature", "sampling_params.top_k")
    other = complete(served, [5], temperature=0.7, top_k=9)
    await refused(other, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", *fields)
