"""What the services tell of prompts: over the wire, of real ranks beside transformers, and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import generation_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm

from bundle.abi.inputs import PROMPT_LOGPROBS
from bundle.abi.outputs import EMBEDDINGS
from runtime_svc.engine.prompt_reports import normalize
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.fakes import VOCAB_SIZE, tell_logprob, tell_top
from tests.servers.adapters import BASE, HOUSE, list_adapters, load_adapter, publish_adapter
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of
from tests.servers.vllm_engine import call, complete, make_request, stub_of

FLAGS = (*DYNAMIC_FLAGS, PROMPT_LOGPROBS, EMBEDDINGS)
PROMPT = [7, 5, 9]
LOGPROBS = [None, tell_logprob(7, 5), tell_logprob(5, 9)]


async def ask(served: Runtime, output: pb.OutputOptions, **fields: Any) -> list[Any]:
    request = token_request(PROMPT, 3)
    request.MergeFrom(pb.GenerateRequest(output=output, **fields))
    return await served.ask(request)


def told_of(events: list[Any]) -> tuple[str, list[pb.Token]]:
    """Text and tokens of the prompt, which come behind the first event."""
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[1] == "prompt"
    assert "prompt" not in kinds[2:]
    assert events[1].sequence_index == 0
    return events[1].prompt.text, list(events[1].prompt.tokens)


async def test_log_probabilities_of_a_prompt(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    assert (await served.get()).capabilities.prompt_logprobs
    events = await ask(served, pb.OutputOptions(prompt_logprobs=2, logprobs=0))
    text, tokens = told_of(events)
    detokenized = await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="d", token_ids=PROMPT))
    assert text == detokenized.text
    assert [token.id for token in tokens] == PROMPT
    assert [token.logprob if token.HasField("logprob") else None for token in tokens] == LOGPROBS
    assert [(one.id, one.logprob) for one in tokens[2].top_logprobs] == tell_top(5, 2)
    assert all(token.HasField("text_offset") for token in tokens)
    new = [token for event in events for token in event.delta.tokens]
    assert events[-1].finished.cumulative_logprob == pytest.approx(sum(token.logprob for token in new), rel=1e-6)
    assert new[0].text_offset == 0


async def test_echo_needs_nothing_of_the_bundle(served: Runtime) -> None:
    await served.deploy()
    assert not (await served.get()).capabilities.prompt_logprobs
    events = await ask(served, pb.OutputOptions(echo=True), num_sequences=2)
    _, tokens = told_of(events)
    assert [(token.id, token.HasField("logprob")) for token in tokens] == [(one, False) for one in PROMPT]


async def test_bundles_that_tell_nothing_of_prompts_say_so(served: Runtime) -> None:
    await served.deploy()
    asked: Any = ask(served, pb.OutputOptions(prompt_logprobs=0))
    caught = await refused(asked, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", "output.prompt_logprobs")
    assert "output_prompt_logprobs: true" in str(caught.fields)
    asked = served.generation.Embed(pb.EmbedRequest(deployment_id="d", inputs=[make_input(PROMPT)]))
    caught = await refused(asked, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", "inputs")
    assert "output_embeddings: true" in str(caught.fields)
    theirs = stub_of(served).Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=PROMPT)))
    await refused(theirs, "UNIMPLEMENTED", "METHOD_NOT_SERVED")


def make_input(token_ids: list[int]) -> pb.EmbedInput:
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=token_ids))


async def embed(served: Runtime, *prompts: list[int], **options: Any) -> pb.EmbedResponse:
    request = pb.EmbedRequest(deployment_id="d", inputs=[make_input(one) for one in prompts], **options)
    return await served.generation.Embed(request)


async def test_embeddings(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    assert (await served.get()).capabilities.embeddings
    last = await embed(served, [5, 9], PROMPT, request_id="mine")
    assert (last.request_id, last.weight_epoch) == ("mine", 1)
    assert [(list(one.values), one.prompt_tokens) for one in last.embeddings] == [([9, 1], 2), ([9, 1], 3)]
    mean = await embed(served, PROMPT, pooling=pb.POOLING_MEAN)
    assert list(mean.embeddings[0].values) == [7, 1]
    unit = await embed(served, PROMPT, pooling=pb.POOLING_MEAN, normalize=True)
    assert list(unit.embeddings[0].values) == pytest.approx(normalize([7, 1]))
    text = pb.EmbedRequest(deployment_id="d", inputs=[pb.EmbedInput(text="hi")])
    assert (await served.generation.Embed(text)).embeddings[0].prompt_tokens > 1
    assert (await served.get()).load.used_slots == 0


async def test_prompts_are_told_by_their_adapters_also_by_those_of_an_earlier_process(tmp_path: Path) -> None:
    roomy = BASE | {"flags": (*BASE["flags"], PROMPT_LOGPROBS, EMBEDDINGS)}

    async def check(served: Runtime, name: str, number: int) -> None:
        vector = (await embed(served, [5, 9], PROMPT, adapter=name)).embeddings[1]
        assert list(vector.values) == [9 + number, 1]
        _, tokens = told_of(await ask(served, pb.OutputOptions(prompt_logprobs=0), adapter=name))
        assert [token.logprob for token in tokens[1:]] == [number + one for one in LOGPROBS if one is not None]

    async with serve_runtime(tmp_path) as first:
        await first.deploy(adapters=HOUSE, **roomy)
        for ref, number in (("swords", 7), ("hooks", 8)):
            publish_adapter(first, ref, number, **roomy)
            await load_adapter(first, ref, name=ref)
        for name, number in (("swords", 7), ("house", 100), ("", 0)):
            await check(first, name, number)
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("READY")
        assert [one.HasField("slot") for one in (await list_adapters(second)).adapters] == [False] * 3
        vectors = (await embed(second, [5, 9], PROMPT, adapter="swords")).embeddings
        assert [list(one.values) for one in vectors] == [[16, 1], [16, 1]], "the first request opens it"
        await check(second, "hooks", 8)


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"inputs": []}, "REQUEST_INVALID", "inputs"),
        ({"inputs": [make_input([5])] * 17}, "REQUEST_INVALID", "inputs"),
        ({"inputs": [make_input([5]), pb.EmbedInput()]}, "REQUEST_INVALID", "inputs[1].prompt"),
        ({"inputs": [make_input([5]), make_input([5, -1])]}, "REQUEST_INVALID", "inputs[1].token_ids.ids[1]"),
        ({"inputs": [make_input([5]), make_input([5] * 30)]}, "PROMPT_TOO_LONG", "inputs[1].token_ids"),
        ({"inputs": [make_input([5]), make_input([])]}, "REQUEST_INVALID", "inputs[1].token_ids.ids"),
        ({"inputs": [make_input([5]), make_input([VOCAB_SIZE])]}, "REQUEST_INVALID", "inputs[1].token_ids.ids[0]"),
        ({"inputs": [pb.EmbedInput(text="")]}, "REQUEST_INVALID", "inputs[0].text"),
        ({"cache_salt": "x" * 257}, "REQUEST_INVALID", "cache_salt"),
        ({"pooling": 9}, "REQUEST_INVALID", "pooling"),
        ({"adapter": "none"}, "FEATURE_NOT_SERVED", "adapter"),
        ({"request_id": "a b"}, "REQUEST_INVALID", "request_id"),
    ],
)
async def test_embed_names_what_is_wrong(served: Runtime, changes: dict[str, Any], reason: str, field: str) -> None:
    await served.deploy(flags=FLAGS)
    request = pb.EmbedRequest(**{"deployment_id": "d", "inputs": [make_input([5])]} | changes)
    await refused(served.generation.Embed(request), "INVALID_ARGUMENT", reason, field)


async def test_the_engine_api_of_routers_tells_of_prompts(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    told = (await complete(served, PROMPT, max_tokens=2, prompt_logprobs=2)).input_logprobs
    assert list(told.token_ids) == PROMPT
    assert [one.value if one.HasField("value") else None for one in told.token_logprobs] == LOGPROBS
    assert [len(one.token_ids) for one in told.top_logprobs] == [0, 2, 2]
    first, *_, last = await call(served, make_request(PROMPT, prompt_logprobs=0))
    assert first.chunk.input_logprobs == last.complete.input_logprobs
    assert not last.complete.input_logprobs.top_logprobs
    response = await stub_of(served).Embed(
        vllm.EmbedRequest(request_id="mine", tokenized=vllm.TokenizedInput(input_ids=PROMPT))
    )
    assert list(response.embedding) == pytest.approx(normalize([9, 1]))
    assert (response.prompt_tokens, response.embedding_dim) == (3, 2)
    too_long = vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=[5] * 30))
    await refused(stub_of(served).Embed(too_long), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "tokenized.input_ids")


async def test_a_client_that_leaves_frees_the_slots_of_its_prompts(served: Runtime) -> None:
    await served.deploy(flags=FLAGS)
    served.ranks.gate.clear()
    running = served.generation.Embed(pb.EmbedRequest(deployment_id="d", inputs=[make_input([5]), make_input([6])]))
    await served.wait_for_slots(1)
    running.cancel()
    await served.wait_for_slots(0)
    served.ranks.gate.set()
    assert tokens_of(await served.generate([5], 2))
