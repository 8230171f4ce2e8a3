"""The runtime on real rank processes, with a toy model whose tokens the eager module gives too."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from functools import partial

import grpc
import msgspec
import psutil
import pytest
import pytest_asyncio
import torch
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb
from safetensors import safe_open

from bundle.digest import sha256_bytes
from compiler_svc.lower.pool import LoweringPool
from execution.executors.executor import load_executor
from execution.forkserver.client import ForkserverClient
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.processes import is_rank, note_others, own_children
from tests.ranks.toy import (
    LAYERS,
    NUM_STATE,
    STATE_SHAPE,
    VOCAB,
    ToyBundle,
    make_bundle,
    make_model,
    save_shard,
    stage_toy,
)
from tests.ranks.toy_publishing import publish_toy
from tests.servers.runtime import Runtime, details_of, raises, serve_runtime, token_request, tokens_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

STATE_BYTES = 2 * LAYERS * 4 * torch.Size(STATE_SHAPE).numel()


@pytest.fixture(scope="module", params=["logits", "tokens"])
def toy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lowerings: ForkserverClient
) -> ToyBundle:
    """One whose tokens the host picks, and one that picks them itself, whose steps are called ahead."""
    directory = tmp_path_factory.mktemp("toy")
    jobs = stage_toy(directory, directory / "cache", request.param, 0)
    executables = asyncio.run(LoweringPool(lowerings, num_processes=2, timeout_s=240).lower(jobs))
    return make_bundle(executables, request.param, directory / "bundle")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(
    tmp_path_factory: pytest.TempPathFactory, toy: ToyBundle, forkservers: RankForkservers
) -> AsyncIterator[Runtime]:
    """A runtime that serves the toy as `d`, other weights published as `other`; tests leave it as they found it."""
    start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open)
    captures = f"--capture-directory={tmp_path_factory.mktemp('captures')}"
    async with serve_runtime(tmp_path_factory.mktemp("runtime"), captures, start_ranks=start_ranks) as served:
        for name, seed in (("story", 0), ("other", 1)):
            served.bundles.names[name] = publish_toy(served.store, toy, seed)
        await served.load("story")
        yield served


def greedy(prompt: list[int], count: int, *, seed: int = 0) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities by the eager module, every position computed anew."""
    model, tokens, logprobs = make_model(seed), list(prompt), []
    for _ in range(count):
        state = [torch.zeros(STATE_SHAPE) for _ in range(NUM_STATE)]
        length = len(tokens)
        inputs = ([tokens], [list(range(length))], [0], [length])
        logits = model(*(torch.tensor(one, dtype=torch.int32) for one in inputs), *state)[0][0]
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1).max()))
    return tokens[len(prompt) :], logprobs


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


async def test_logprobs_are_those_of_the_model(real: Runtime) -> None:
    request = token_request([3, 9, 4], 5, temperature=0.0)
    request.output.logprobs = 3
    events = [event async for event in real.generation.Generate(request)]
    tokens, logprobs = greedy([3, 9, 4], 5)
    generated = [token for event in events for token in event.delta.tokens]
    assert [token.id for token in generated] == tokens
    assert [token.logprob for token in generated] == pytest.approx(logprobs, abs=1e-5)
    assert all(token.top_logprobs[0].id == token.id for token in generated)
    assert all(len(token.top_logprobs) == 3 for token in generated)


async def test_captured_inputs_give_the_same_tokens_when_they_are_run_again(real: Runtime, toy: ToyBundle) -> None:
    request = token_request([3, 9, 4], 5, temperature=0.0)
    request.output.capture_inputs.num_steps = 5
    company = asyncio.create_task(generate(real, [11] * 8, 8))
    events = [event async for event in real.generation.Generate(request)]
    await company
    tokens, logprobs = run_again(toy, events[-1].finished.captured_inputs_path)
    expected = greedy([3, 9, 4], 5)
    assert tokens == tokens_of(events) == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-5)


def run_again(toy: ToyBundle, path: str) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities of every step of a capture, from a fresh executor."""
    executor, tokens, logprobs = load_executor(toy.manifest, 0, toy.blob_path), [], []
    inputs_of = {one.tag: [spec.name for spec in one.inputs] for one in toy.manifest.executables}
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        for step in range(int(metadata["captured_steps"])):
            tag, row = metadata[f"{step}.executable"], int(metadata[f"{step}.row"])
            outputs = executor.run(tag, {name: file.get_tensor(f"{step}.{name}") for name in inputs_of[tag]})
            tokens.append(int(outputs["logits"][row].argmax()))
            logprobs.append(float(outputs["logits"][row].log_softmax(-1).max()))
    executor.close()
    return tokens, logprobs


async def test_seeds_reproduce_their_tokens(real: Runtime) -> None:
    async def sample(seed: int) -> list[int]:
        return tokens_of(await real.generate([3, 9, 4], 8, temperature=2.0, seed=seed))

    alone = await sample(1)
    together = await asyncio.gather(*(sample(seed) for seed in (2, 1, 3, 4)))
    assert together[1] == alone
    assert len({tuple(tokens) for tokens in together}) > 1


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


async def test_weights_that_a_rank_cannot_map_leave_the_old_ones_serving(real: Runtime, toy: ToyBundle) -> None:
    broken = dataclasses.replace(toy, weights={0: toy.weights[0].with_name("broken.safetensors")})
    broken.weights[0].write_bytes(toy.weights[0].read_bytes()[:100])
    real.bundles.names["broken"] = publish_toy(real.store, broken, 0)
    async with raises("FAILED_PRECONDITION", "WEIGHTS_INVALID"):
        await real.load_weights("broken")
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8)[0]


async def test_an_executable_that_cannot_be_loaded_is_refused_without_a_path(real: Runtime, toy: ToyBundle) -> None:
    garbage = toy.weights[0].with_name("garbage")
    garbage.write_bytes(b"no program")
    blob = sha256_bytes(b"no program")
    executables = tuple(msgspec.structs.replace(one, blob=blob) for one in toy.manifest.executables)
    manifest = msgspec.structs.replace(toy.manifest, executables=executables)
    broken = dataclasses.replace(toy, manifest=manifest, blobs={blob: garbage})
    real.bundles.names["garbage"] = publish_toy(real.store, broken, 0)
    async with raises("FAILED_PRECONDITION", "EXECUTABLE_INVALID"):
        await real.load("garbage", "g")
    await real.unload("g")


async def test_prompt_without_numbers_ends_alone(real: Runtime, toy: ToyBundle) -> None:
    """One embedding of the checkpoint is NaN, as a model's numbers are when they overflow."""
    prompts = [[7], [3, 9, 4], [5, 6, 7, 8, 9], [11] * 8]
    expected = [greedy(prompt, 8)[0] for prompt in prompts]
    poison = min(set(range(3, VOCAB)) - {token for one in (*prompts, *expected) for token in one})
    model = make_model(0)
    model.embedding.weight[poison] = float("nan")
    path = toy.weights[0].with_name("poisoned.safetensors")
    poisoned = dataclasses.replace(toy, weights={0: save_shard(model, 0, 1, path)})
    real.bundles.names["poisoned"] = publish_toy(real.store, poisoned, 0)
    await real.load_weights("poisoned")
    ranks, statistics = rank_processes(), real.server.deployments.get("d").engine.scheduler.statistics  # type: ignore[union-attr]
    company = asyncio.gather(*(generate(real, prompt, 8) for prompt in prompts * 3))
    for index in range(6):
        request = token_request([4, poison, 4][: 2 + index % 2], 8, temperature=index % 3)
        events = await collect(real.generation.Generate(request))
        assert isinstance(events[-1], grpc.aio.AioRpcError)
        assert (events[-1].code(), details_of(events[-1])[0].reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "NUMERICS_INVALID",
        )
        assert events[-2].finished.reason == generation.FINISH_REASON_ERROR
        assert await generate(real, prompts[0], 8) == expected[0], "its slot holds nothing of it"
    assert await company == expected * 3
    assert statistics.invalid_requests == 6
    assert rank_processes() == ranks, "no rank was restarted"
    await real.load_weights("story")


async def test_reset_zeroes_the_cache_of_the_rank(real: Runtime) -> None:
    await generate(real, [3], 4)
    receipt = await real.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"))
    assert receipt.zeroed_bytes == (await real.get()).kv_bytes == STATE_BYTES
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8)[0]


async def test_killed_rank_is_replaced(real: Runtime) -> None:
    (rank,) = rank_processes()
    streams = [real.generation.Generate(token_request([index + 3], 15, temperature=0.0)) for index in range(8)]
    await anext(aiter(streams[0]))
    killed_at_s = time.monotonic()
    rank.kill()
    outcomes = await asyncio.gather(*(collect(stream) for stream in streams))
    died = [events for events in outcomes if isinstance(events[-1], grpc.aio.AioRpcError)]
    for events in died:
        assert events[-1].code() is grpc.StatusCode.UNAVAILABLE
        assert events[-2].finished.reason == generation.FINISH_REASON_ERROR
    assert 1 <= len(died) <= 2, "only those that held a slot"
    assert time.monotonic() - killed_at_s < 60
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8)[0]


async def collect(stream: grpc.aio.UnaryStreamCall) -> list[object]:  # type: ignore[type-arg]
    """Events of a stream, with the error that ended it, if one did."""
    events: list[object] = []
    try:
        async for event in stream:
            events.append(event)  # noqa: PERF401
    except grpc.aio.AioRpcError as error:
        events.append(error)
    return events


async def test_idle_rank_that_is_killed_is_replaced_unasked(real: Runtime) -> None:
    (rank,) = rank_processes()
    rank.kill()
    async with asyncio.timeout(60):
        while rank_processes() in ([], [rank]) or (await real.get()).state != pb.Deployment.STATE_READY:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await generate(real, [3, 9, 4], 8) == greedy([3, 9, 4], 8)[0]


async def test_unload_ends_the_process(real: Runtime) -> None:
    await real.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id="d"))
    assert rank_processes() == []
    await real.load("story")
