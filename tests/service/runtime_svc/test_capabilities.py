"""What a deployment says that it accepts, and that it does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.abi.inputs import COMPUTED_CONTEXT
from bundle.manifest import GenerationDefaults, Serving
from runtime_svc.admission.capabilities import MAX_LOGITS_BYTES, Capabilities
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.hang_guard import until
from tests.ranks.fakes import GREEDY, VOCAB_SIZE, expected_tokens, make_manifest
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of

CUTTING = Serving(input_truncation=True)


async def test_every_capability_is_told(served: Runtime) -> None:
    deployment = await served.deploy(max_new_tokens=7, ctx_batch_size=2)
    expected = pb.Capabilities(
        max_context_length=16,
        max_length=64,
        max_batch_size=4,
        vocab_size=VOCAB_SIZE,
        dynamic_sampling=True,
        max_top_k=50,
        logprobs=True,
        chat=True,
        chat_templates=["default"],
        default_sampling=pb.DefaultSampling(temperature=0.0, top_k=0, top_p=1.0),
        default_parameters=generation.SamplingParams(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            typical_p=1.0,
            no_repeat_ngram_size=0,
            min_new_tokens=0,
        ),
        eos_token_ids=[2],
        max_new_tokens=7,
        text=True,
        logits=True,
        max_logprobs=20,
        max_stop_strings=16,
        max_stop_token_ids=1024,
        max_num_sequences=16,
        padding_side="right",
        async_mode=True,
        logit_processors=True,
        constraints=True,
        submodels=[
            pb.SubmodelBuckets(submodel="context_encoding", batch_size=2, tokens=[8, 16]),
            pb.SubmodelBuckets(submodel="token_generation", batch_size=4, tokens=[16, 64]),
        ],
    )
    assert deployment.capabilities == expected
    assert (await served.get()).capabilities == expected
    assert list((await served.info()).deployments) == [
        pb.DeploymentInfo(
            id="d",
            state=pb.Deployment.STATE_READY,
            capabilities=expected,
            chunk_tokens=16,
            weights_digest=deployment.roles[0].weights_digest,
        )
    ]


async def test_a_deployment_may_have_its_own_time_between_tokens(tmp_path: Path) -> None:
    target = Duration(nanos=1000)
    async with serve_runtime(tmp_path, "--target-inter-token-latency=1000") as served:
        served.publish(flags=(*DYNAMIC_FLAGS, COMPUTED_CONTEXT))
        own = (await served.load("story", "own", target_inter_token_latency=target))[-1].deployment
        default = (await served.load("story", "default"))[-1].deployment
        assert (own.target_inter_token_latency, default.target_inter_token_latency) == (target, Duration(seconds=1000))
        assert (await served.load("story", "own"))[-1].deployment.target_inter_token_latency == target
        other = served.load("story", "own", target_inter_token_latency=Duration(seconds=1))
        caught = await refused(other, "ALREADY_EXISTS", "DEPLOYMENT_EXISTS")
        assert "target_inter_token_latency_s 1e-06" in caught.message


async def test_chunks_are_chosen_for_the_time_of_their_deployment(served: Runtime) -> None:
    served.publish(flags=(*DYNAMIC_FLAGS, COMPUTED_CONTEXT))
    await served.load("story", "own", target_inter_token_latency=Duration(seconds=1))
    default = (await served.load("story", "default"))[-1].deployment
    assert not default.HasField("target_inter_token_latency")
    chunks = {one.id: one.chunk_tokens for one in (await served.info()).deployments}
    assert chunks == {"own": 8, "default": 16}, "the smallest, until a larger one is known to meet the target"


async def test_unset_sampling_values_are_those_that_the_checkpoint_names(served: Runtime) -> None:
    named = GenerationDefaults(temperature=0.6, top_p=0.9)
    deployment = await served.deploy(serving=Serving(generation=named))
    default = deployment.capabilities.default_sampling
    assert (default.temperature, default.top_k, default.top_p) == (pytest.approx(0.6), 0, pytest.approx(0.9))
    request = token_request([3], 4)
    request.sampling.CopyFrom(generation.SamplingParams(top_p=0.5, seed=9))
    accepted = (await served.generation.Generate(request).read()).accepted
    assert (accepted.sampling.temperature, accepted.sampling.top_p) == (pytest.approx(0.6), pytest.approx(0.5))


async def test_penalties_that_the_checkpoint_names_are_values_of_requests(served: Runtime) -> None:
    named = GenerationDefaults(repetition_penalty=1.5, no_repeat_ngram_size=3, bad_words=((4, 5),))
    sampling = msgspec.structs.replace(GREEDY, mode="host", dynamic=True)
    deployment = await served.deploy(flags=("logits",), sampling=sampling, serving=Serving(generation=named))
    told = deployment.capabilities.default_parameters
    assert (told.repetition_penalty, told.no_repeat_ngram_size) == (1.5, 3)
    assert ([[*word.ids] for word in told.bad_words], told.min_p, told.HasField("seed")) == ([[4, 5]], 0.0, False)
    request = token_request([3], 4)
    request.sampling.CopyFrom(generation.SamplingParams(repetition_penalty=1.0))
    accepted = (await served.generation.Generate(request).read()).accepted.sampling
    assert (accepted.repetition_penalty, accepted.no_repeat_ngram_size) == (1.0, 3)


async def test_what_a_bundle_lacks_is_told_and_refused_by_name(served: Runtime) -> None:
    deployment = await served.deploy(
        flags=("left_padded", "tokens"), sampling=GREEDY, tokenizer=None, chat_template=None, serving=CUTTING
    )
    told = deployment.capabilities
    assert (told.text, told.chat, told.logprobs, told.logits, told.max_logprobs) == (False, False, False, False, 0)
    assert (told.padding_side, told.input_truncation, told.max_new_tokens) == ("left", True, 0)
    assert (told.logit_processors, told.constraints) == (False, False)
    request = token_request([3])
    request.output.logits = True
    request.output.logprobs = 1
    request.stop.stop_strings.append("x")
    fields = ("output.logprobs", "output.logits", "stop.stop_strings")
    await refused(served.generation.Generate(request), "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", *fields)


async def test_server_tells_deployments_that_are_not_ready_yet(served: Runtime) -> None:
    assert list((await served.info()).deployments) == []
    served.publish()
    served.load_gate.clear()
    load = asyncio.create_task(served.load("story"))
    await until(lambda: served.groups)
    await served.wait_for(lambda one: one.capabilities.max_length == 64)
    (told,) = (await served.info()).deployments
    assert (told.state, told.capabilities.max_length) == (pb.Deployment.STATE_LOADING, 64)
    served.load_gate.set()
    await load


async def test_prompt_that_is_too_long_keeps_its_end(served: Runtime) -> None:
    await served.deploy(serving=CUTTING)
    for length in (16, 17, 40):
        prompt = list(range(3, 3 + length))
        events = await served.generate(prompt)
        accepted, usage = events[0].accepted, events[-1].finished.usage
        assert (accepted.prompt_token_count, accepted.truncated_tokens) == (16, length - 16)
        assert usage.prompt_tokens == 16
        assert tokens_of(events) == expected_tokens(prompt[-16:], 5)


async def test_logits_of_every_token(served: Runtime) -> None:
    await served.deploy()
    request = token_request([3, 4], 3)
    request.output.logits = True
    events, without = await asyncio.gather(served.ask(request), served.generate([3, 4], 3))
    tokens = [token for event in events for token in event.delta.tokens]
    assert [token.id for token in tokens] == expected_tokens([3, 4], 3)
    for token in tokens:
        assert list(token.logits) == [1.0 if one == token.id else -one / 2 for one in range(VOCAB_SIZE)]
    assert not any(token.logits for event in without for token in event.delta.tokens)
    assert [step.return_logits for step in served.ranks.steps].count(False) >= 2, "no request asked in these steps"


@pytest.mark.parametrize(
    ("options", "logits", "max_logprobs"),
    [
        ({"vocab_size": MAX_LOGITS_BYTES // 4}, True, 20),
        # They exceed a message.
        ({"vocab_size": MAX_LOGITS_BYTES // 4 + 1}, False, 20),
        ({"vocab_size": 7}, True, 7),
        # Those that ranks keep for themselves.
        ({"flags": ("noise_keys", "rank_logits", "sampling_params", "tokens")}, False, 0),
    ],
)
def test_logits_and_alternatives_that_are_served(options: dict[str, Any], logits: bool, max_logprobs: int) -> None:
    told = Capabilities.from_manifest(make_manifest(**options))
    assert (told.logits, told.logprobs, told.max_logprobs) == (logits, max_logprobs > 0, max_logprobs)
    assert told.logit_processors


async def test_left_padded_prompts_in_company(served: Runtime) -> None:
    flags = ("left_padded", "logits", "noise_keys", "sampling_params", "tokens")
    await served.deploy(flags=flags, ctx_batch_size=2)
    prompts = [[3], list(range(3, 11)), list(range(3, 12)), list(range(3, 19)), [5, 6]]
    streams = await asyncio.gather(*(served.generate(prompt, 6) for prompt in prompts))
    assert [tokens_of(events) for events in streams] == [expected_tokens(prompt, 6) for prompt in prompts]
