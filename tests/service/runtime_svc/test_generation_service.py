"""The data plane over loopback, on ranks whose tokens can be computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from tests.ranks.fakes import EOS, expected_tokens
from tests.servers.runtime import Runtime, text_of, token_request, tokens_of


async def test_stream_follows_the_contract(served: Runtime) -> None:
    await served.deploy()
    events = await served.generate([5, 6], 7, request_id="mine", temperature=0.5, top_k=9, seed=11)
    # As many deltas as steps, or fewer if this process is late to read.
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", *["delta"] * (len(events) - 2), "finished"]
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
    assert (usage.kv_blocks, usage.kv_tokens) == (1, 8)
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
    assert (await served.generate([5], 1000))[0].accepted.max_new_tokens == 6
    await served.deploy("unlimited", ref="other")
    events = await served.generate([5] * 16, None, deployment_id="unlimited")
    assert events[0].accepted.max_new_tokens == 48, "what the context has room for"
    assert tokens_of(events) == expected_tokens([5] * 16, 48)


async def tokenize(served: Runtime, **prompt: Any) -> list[int]:
    return list((await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", **prompt))).token_ids)


async def test_text_and_chat_prompts_are_tokenized(served: Runtime) -> None:
    await served.deploy()
    text = pb.GenerateRequest(deployment_id="d", text="a cat")
    tokens = await tokenize(served, text="a cat")
    events = await served.ask(text)
    assert events[0].accepted.prompt_token_count == len(tokens)
    generated = tokens_of(events)
    assert generated == expected_tokens(tokens, len(generated))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = await tokenize(served, chat=chat)
    detokenize = pb.DetokenizeRequest(deployment_id="d", token_ids=ids, skip_special_tokens=False)
    assert (await served.generation.Detokenize(detokenize)).text == "<s>hi>"
    detokenize.ClearField("skip_special_tokens")
    assert (await served.generation.Detokenize(detokenize)).text == "hi>"
    chat.add_generation_prompt = False
    tool = '{"share": 0.5, "name": "find", "count": 9007199254740993, "nested": {"b": [1.0, null], "a": true}}'
    chat.tools_json.append(tool)
    ids = await tokenize(served, chat=chat)
    rendered = (await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="d", token_ids=ids))).text
    assert rendered == f"hi[{tool}]", "keys keep their order, integers their digits"


async def test_stop_string_is_not_part_of_the_text(served: Runtime) -> None:
    await served.deploy()
    whole = text_of(await served.generate([5], 40))
    stop = whole[12:15]
    request = token_request([5], 40)
    request.stop.stop_strings.append(stop)
    events = await served.ask(request)
    assert text_of(events) == whole[: whole.index(stop)]
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_STRING
    assert events[-1].finished.stop_string == stop


async def test_stop_tokens_of_bundle_and_request(served: Runtime) -> None:
    await served.deploy()
    # 5 + 506 + bias 1 is 512, which is 3 modulo 509; one less is the bundle's own stop token, 2.
    prompt = [5, 505]
    assert expected_tokens(prompt, 1) == [EOS]
    request = pb.GenerateRequest(deployment_id="d", token_ids=pb.TokenIds(ids=prompt))
    events = await served.ask(request)
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN
    assert events[-1].finished.stop_token_id == EOS
    assert events[-1].finished.usage.generated_tokens == 1
    assert text_of(events) == ""
    request.stop.ignore_eos = True
    third = expected_tokens(prompt, 3)[2]
    request.stop.stop_token_ids.append(third)
    events = await served.ask(request)
    assert tokens_of(events) == expected_tokens(prompt, 3)
    assert events[-1].finished.stop_token_id == third


async def test_logprobs_come_with_text_of_alternatives(served: Runtime) -> None:
    await served.deploy()
    request = token_request([5], 2)
    request.output.logprobs = 2
    events = await served.ask(request)
    token = events[1].delta.tokens[0]
    assert token.logprob == pytest.approx(-token.id / 10)
    assert [other.id for other in token.top_logprobs] == [token.id, token.id + 1]
    ids = pb.DetokenizeRequest(deployment_id="d", token_ids=[token.id])
    assert token.top_logprobs[0].text == token.text == (await served.generation.Detokenize(ids)).text
    request.output.ClearField("logprobs")
    events = await served.ask(request)
    assert not events[1].delta.tokens[0].HasField("logprob")


async def test_a_chat_is_rendered_by_the_template_that_it_names(served: Runtime) -> None:
    templates = {"tool_use": "{{ messages[0].content }} cat", "rag": "{{ messages[0].content }} small"}
    deployed = await served.deploy(chat_template="{{ messages[0].content }}", chat_templates=templates)
    assert list(deployed.capabilities.chat_templates) == ["default", "rag", "tool_use"]

    turn, tool = pb.ChatMessage(role="user", content="a"), '{"name": "f"}'
    for text, chat in {
        "a": pb.Chat(messages=[turn]),
        "a cat": pb.Chat(messages=[turn], tools_json=[tool]),
        "a small": pb.Chat(messages=[turn], tools_json=[tool], chat_template="rag"),
    }.items():
        # The tokenizer of the bundle puts <s> before a text, and a template writes none here.
        assert await tokenize(served, chat=chat) == (await tokenize(served, text=text))[1:]
    named_default = pb.Chat(messages=[turn], tools_json=[tool], chat_template="default")
    assert await tokenize(served, chat=named_default) == await tokenize(served, chat=pb.Chat(messages=[turn]))
