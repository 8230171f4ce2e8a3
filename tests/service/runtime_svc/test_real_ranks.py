"""The runtime on real rank processes, with a toy model whose tokens the eager module gives too."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import psutil
import pytest
import pytest_asyncio
import torch
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb
from safetensors import safe_open
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from bundle.digest import sha256_bytes
from execution.executors.executor import load_executor
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.processes import is_rank, note_others, own_children
from tests.ranks.toy import VOCAB, ToyBundle, greedy, make_model, make_writable, save_shard
from tests.ranks.toy_bundles import MakeToy, toy, toy_directory
from tests.ranks.toy_publishing import publish_toy
from tests.servers.refusals import Refusal, refusal, refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of

__all__ = ["toy", "toy_directory"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["logits", "tokens", "processed"])
def bundle(request: pytest.FixtureRequest, toy: MakeToy) -> ToyBundle:
    """One whose tokens the host picks; one that picks them itself, whose steps are called ahead, and whose ranks pick
    those of rows with processors; and one that changes logits before.
    """
    return toy(request.param, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(
    tmp_path_factory: pytest.TempPathFactory, bundle: ToyBundle, forkservers: RankForkservers
) -> AsyncIterator[Runtime]:
    """A runtime that serves the toy as `d`, other weights published as `other`; tests leave it as they found it."""
    start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open)
    captures = f"--capture-directory={tmp_path_factory.mktemp('captures')}"
    async with serve_runtime(tmp_path_factory.mktemp("runtime"), captures, start_ranks=start_ranks) as served:
        for name, seed in (("story", 0), ("other", 1)):
            served.bundles.names[name] = publish_toy(served.store, bundle, seed)
        await served.load("story")
        yield served


@pytest.fixture(scope="module", autouse=True)
def _others() -> None:
    note_others()


def rank_processes() -> list[psutil.Process]:
    """This process's ranks that run."""
    return [child for child in own_children() if is_rank(child)]


async def generate(served: Runtime, prompt: list[int], count: int) -> list[int]:
    return tokens_of(await served.generate(prompt, count, temperature=0.0))


async def test_tokens_are_those_of_the_model_alone_and_in_company(real: Runtime) -> None:
    prompts = [[7], [3, 9, 4], [11] * 8, [5, 6, 7, 8, 9], [40, 2, 33, 17, 8, 21]]
    expected = [greedy(prompt, 8)[0] for prompt in prompts]
    assert await generate(real, prompts[0], 8) == expected[0]
    assert await asyncio.gather(*(generate(real, prompt, 8) for prompt in prompts)) == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"logit_bias": {7: -100.0, 20: 1.5, 31: 0.5}},
    {"repetition_penalty": 0.8, "presence_penalty": -1.5},
    {"repetition_penalty": 1.6, "frequency_penalty": 1.9, "logit_bias": {3: 2.0}},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "bad_words": [[5], [40, 2]], "frequency_penalty": -0.5},
    {"allowed_token_ids": list(range(20, 30)), "no_repeat_ngram_size": 1},
]


def process_as_transformers(num_prompt_tokens: int, asked: dict[str, Any], ids: list[int], logits: Tensor) -> Tensor:
    """What transformers' processors make of logits, and penalties as OpenAI defines them."""
    processors = LogitsProcessorList()
    if biases := asked.get("logit_bias"):
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()}))
    processors.append(RepetitionPenaltyLogitsProcessor(asked.get("repetition_penalty", 1.0)))
    logits = processors(torch.tensor([ids]), logits[None])
    for token, count in Counter(ids[num_prompt_tokens:]).items():
        logits[0, token] -= asked.get("frequency_penalty", 0.0) * count + asked.get("presence_penalty", 0.0)
    processors = LogitsProcessorList()
    if size := asked.get("no_repeat_ngram_size"):
        processors.append(NoRepeatNGramLogitsProcessor(size))
    if words := asked.get("bad_words"):
        processors.append(NoBadWordsLogitsProcessor(words))
    if allowed := asked.get("allowed_token_ids"):
        processors.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    return processors(torch.tensor([ids]), logits)[0]


async def ask_logprobs(served: Runtime, prompt: list[int], asked: dict[str, Any]) -> list[Any]:
    asked = asked | {"bad_words": [generation.TokenIds(ids=word) for word in asked.get("bad_words", ())]}
    request = token_request(prompt, 8, temperature=0.0, **asked)
    request.output.logprobs = 0
    return await served.ask(request)


async def test_processors_give_the_tokens_of_transformers_processors(real: Runtime) -> None:
    """Each request has batch-mates with other parameters, or with none."""
    prompts = [[7], [3, 9, 4], [11] * 8, [5, 6, 7, 8, 9], [40, 2, 33, 17, 8, 21]]
    requests = [(prompt, asked) for prompt in prompts for asked in ({}, *PROCESSED)]
    expected = [
        greedy(prompt, 8, process=partial(process_as_transformers, len(prompt), asked)) for prompt, asked in requests
    ]
    answers = await asyncio.gather(*(ask_logprobs(real, prompt, asked) for prompt, asked in requests))
    assert [tokens_of(answer) for answer in answers] == [tokens for tokens, _ in expected]
    logprobs = [[token.logprob for event in answer for token in event.delta.tokens] for answer in answers]
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor([one for _, one in expected]))
    changed = [tokens != greedy(prompt, 8)[0] for (prompt, _), (tokens, _) in zip(requests, expected, strict=True)]
    assert sum(changed) > len(prompts) * 5


async def test_min_p_of_one_leaves_the_likeliest_token(real: Runtime) -> None:
    prompts = [[3, 9, 4], [5, 6, 7, 8, 9]]
    drawn = [
        await asyncio.gather(
            *(real.generate(prompt, 8, temperature=1.5, seed=3, min_p=min_p) for prompt in prompts for min_p in (1, 0))
        )
        for _ in range(2)
    ]
    assert [tokens_of(one) for one in drawn[0]] == [tokens_of(one) for one in drawn[1]]
    assert [tokens_of(one) for one in drawn[0][::2]] == [greedy(prompt, 8)[0] for prompt in prompts]
    assert [tokens_of(one) for one in drawn[0][1::2]] != [greedy(prompt, 8)[0] for prompt in prompts]


async def test_tokens_are_forced_and_ends_wait(real: Runtime) -> None:
    forced = token_request([3, 9, 4], 8, temperature=0.0, forced_token_ids=[30, 31])
    assert tokens_of(await real.ask(forced)) == [30, 31, *greedy([3, 9, 4, 30, 31], 6)[0]]
    plain = greedy([3, 9, 4], 8)[0]
    request = token_request([3, 9, 4], 8, temperature=0.0, min_new_tokens=4)
    request.stop.stop_token_ids.append(plain[0])

    def exclude(ids: list[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, torch.tensor(plain[:1] if len(ids) < 3 + 4 else []).long(), float("-inf"))

    expected = greedy([3, 9, 4], 8, process=exclude)[0]
    length = expected.index(plain[0]) + 1 if plain[0] in expected else 8
    assert tokens_of(await real.ask(request)) == expected[:length]
    assert length > 4


async def test_captured_inputs_give_the_same_tokens_when_they_are_run_again(real: Runtime, bundle: ToyBundle) -> None:
    request = token_request([3, 9, 4], 5, temperature=0.0)
    request.output.capture_inputs.num_steps = 5
    request.output.logprobs = 0
    company = asyncio.create_task(generate(real, [11] * 8, 8))
    events = await real.ask(request)
    await company
    tokens, logprobs = run_again(bundle, events[-1].finished.captured_inputs_path)
    expected = greedy([3, 9, 4], 5)
    assert tokens == tokens_of(events) == expected[0]
    told = [token.logprob for event in events for token in event.delta.tokens]
    assert told == pytest.approx(expected[1], abs=1e-5)
    assert logprobs == pytest.approx(expected[1], abs=1e-5)


def run_again(bundle: ToyBundle, path: str) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities of every step of a capture, from a fresh executor."""
    executor, tokens, logprobs = load_executor(bundle.manifest, 0, bundle.blob_path), [], []
    inputs_of = {one.tag: [spec.name for spec in one.inputs] for one in bundle.manifest.executables}
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        for step in range(int(metadata["captured_steps"])):
            tag, row = metadata[f"{step}.executable"], int(metadata[f"{step}.row"])
            outputs = executor.run(tag, {name: file.get_tensor(f"{step}.{name}") for name in inputs_of[tag]})
            tokens.append(int(outputs["logits"][row].argmax()))
            logprobs.append(float(outputs["logits"][row].log_softmax(-1).max()))
    executor.close()
    return tokens, logprobs


async def test_weights_are_swapped_under_running_requests(real: Runtime) -> None:
    assert greedy([3, 9, 4], 8)[0] != greedy([3, 9, 4], 8, seed=1)[0]
    streams = [asyncio.create_task(generate(real, [index + 3], 12)) for index in range(6)]
    events = await real.load_weights(
        "other", in_flight_policy=pb.IN_FLIGHT_POLICY_CONTINUE, kv_policy=pb.KV_POLICY_KEEP
    )
    assert events[-1].result.weight_epoch == 2
    assert all(len(tokens) == 12 for tokens in await asyncio.gather(*streams))
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8, seed=1)[0]
    await real.load_weights("story")
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8)[0]


async def test_weights_that_a_rank_cannot_map_leave_the_old_ones_serving(
    real: Runtime, bundle: ToyBundle, tmp_path: Path
) -> None:
    broken = dataclasses.replace(bundle, weights={0: tmp_path / "broken.safetensors"})
    broken.weights[0].write_bytes(bundle.weights[0].read_bytes()[:100])
    real.bundles.names["broken"] = publish_toy(real.store, broken, 0)
    await refused(real.load_weights("broken"), "FAILED_PRECONDITION", "WEIGHTS_INVALID")
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8)[0]


async def test_an_executable_that_cannot_be_loaded_is_refused_without_a_path(
    real: Runtime, bundle: ToyBundle, tmp_path: Path
) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no program")
    blob = sha256_bytes(b"no program")
    executables = tuple(msgspec.structs.replace(one, blob=blob) for one in bundle.manifest.executables)
    manifest = msgspec.structs.replace(bundle.manifest, executables=executables)
    broken = dataclasses.replace(bundle, manifest=manifest, blobs={blob: garbage})
    real.bundles.names["garbage"] = publish_toy(real.store, broken, 0)
    await refused(real.load("garbage", "g"), "FAILED_PRECONDITION", "EXECUTABLE_INVALID")
    await real.unload("g")


async def test_prompt_without_numbers_ends_alone(real: Runtime, bundle: ToyBundle, tmp_path: Path) -> None:
    """One embedding of the checkpoint is NaN, as a model's numbers are when they overflow."""
    prompts = [[7], [3, 9, 4], [5, 6, 7, 8, 9], [11] * 8]
    expected = [greedy(prompt, 8)[0] for prompt in prompts]
    poison = min(set(range(3, VOCAB)) - {token for one in (*prompts, *expected) for token in one})
    model = make_model(0)
    model.embedding.weight[poison] = float("nan")
    path = tmp_path / "poisoned.safetensors"
    poisoned = dataclasses.replace(bundle, weights={0: save_shard(model, 0, 1, path)})
    real.bundles.names["poisoned"] = publish_toy(real.store, poisoned, 0)
    await real.load_weights("poisoned")
    ranks, statistics = rank_processes(), real.engine().scheduler.statistics
    company = asyncio.gather(*(generate(real, prompt, 8) for prompt in prompts * 3))
    for index in range(6):
        request = token_request([4, poison, 4][: 2 + index % 2], 8, temperature=index % 3)
        how = await refused(real.generation.Generate(request), "FAILED_PRECONDITION", "NUMERICS_INVALID")
        assert how.events[-1].finished.reason == generation.FINISH_REASON_ERROR
        assert await generate(real, prompts[0], 8) == expected[0], "its slot holds nothing of it"
    assert await company == expected * 3
    assert statistics.invalid_requests == 6
    assert rank_processes() == ranks, "no rank was restarted"
    await real.load_weights("story")


async def test_killed_rank_is_replaced(real: Runtime) -> None:
    (rank,) = rank_processes()
    streams = [real.generation.Generate(token_request([index + 3], 15, temperature=0.0)) for index in range(8)]
    await anext(aiter(streams[0]))
    killed_at_s = time.monotonic()
    rank.kill()
    outcomes = await asyncio.gather(*map(refusal, streams), return_exceptions=True)
    died = [how for how in outcomes if isinstance(how, Refusal)]
    for how in died:
        assert (how.code, how.reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_DIED")
        assert how.events[-1].finished.reason == generation.FINISH_REASON_ERROR
    assert 1 <= len(died) <= 2, "only those that held a slot"
    assert time.monotonic() - killed_at_s < 60
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8)[0]


async def test_mutable_weights_outlive_a_swap_and_a_restart(real: Runtime, bundle: ToyBundle) -> None:
    """The bundle of the new weights has no mutable set: the executables keep their own."""
    writable = dataclasses.replace(bundle, manifest=make_writable(bundle.manifest))
    real.bundles.names["writable"] = publish_toy(real.store, writable, 0)
    before = rank_processes()
    await real.load("writable", "w")
    (rank,) = (one for one in rank_processes() if one not in before)
    # Embeddings and biases are zeros, so that all tokens are equally likely.
    assert tokens_of(await real.generate([3, 9, 4], 4, temperature=0.0, deployment_id="w")) == [0] * 4
    await real.load_weights("other", "w")
    rank.kill()
    await real.wait_for_state("RECOVERING", "w")
    await real.wait_for_state("READY", "w")
    assert tokens_of(await real.generate([3, 9, 4], 4, temperature=0.0, deployment_id="w")) == [0] * 4
    await real.unload("w")
