"""Long prompts in chunks between the tokens of running sequences, over slots and blocks."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from bundle.abi.inputs import COMPUTED_CONTEXT, LIVE_ROWS
from bundle.manifest import Serving
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.engines import EngineHarness, StartEngine, collect, tokens_of, wait_until
from tests.ranks.fakes import expected_tokens, make_manifest
from tests.ranks.scheduling import make_block_scheduler, make_request, make_scheduler, names, run_step

FLAGS = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)
LAYOUTS: dict[str, dict[str, Any]] = {
    "slots": {"flags": FLAGS},
    "slots, rows packed": {"flags": (*FLAGS, LIVE_ROWS)},
    "blocks": {"flags": FLAGS, "num_blocks": 80, "block_tokens": 4},
    "blocks, prefixes": {"flags": FLAGS, "num_blocks": 80, "block_tokens": 4, "serving": Serving(prefix_caching=True)},
}
#: Executables for chunks of 8, 16 and 32.
BUCKETS: dict[str, Any] = {"prompt_buckets": (8, 16, 32), "token_buckets": (256,)}


def list_chunks(harness: EngineHarness) -> list[tuple[int, int]]:
    """First position and tokens of the rows of each context_encoding step."""
    return [
        (int(step.inputs["computed_context_lens"][0]), int(step.inputs["num_tokens"][0]))
        for step in harness.ranks.steps
        if step.tag.startswith("context")
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_prompt_longer_than_every_bucket_is_computed_in_the_largest(
    start_engine: StartEngine, layout: str
) -> None:
    harness = await start_engine(**BUCKETS | LAYOUTS[layout])
    prompt = [4 + number % 40 for number in range(70)]
    assert tokens_of(await collect(harness.submit(prompt, max_new_tokens=6))) == expected_tokens(prompt, 6)
    assert list_chunks(harness) == [(0, 32), (32, 32), (64, 6)]
    assert harness.ranks.steps[2].tag == "context_encoding_8", "the smallest for what is left"


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_long_prompt_delays_running_sequences_by_one_chunk_at_a_time(
    start_engine: StartEngine, layout: str
) -> None:
    harness = await start_engine(EngineConfig(chunks=ChunkLimits(20)), step_s=0.001, **BUCKETS | LAYOUTS[layout])
    running = [harness.submit([number, 7], max_new_tokens=60) for number in range(5, 8)]
    await wait_until(lambda: len(harness.ranks.steps) > 6)
    begin = len(harness.ranks.steps)
    long = [4 + number % 40 for number in range(150)]
    stream = harness.submit(long, max_new_tokens=4)
    tokens = [tokens_of(await collect(one)) for one in (*running, stream)]
    assert tokens == [*(expected_tokens([number, 7], 60) for number in range(5, 8)), expected_tokens(long, 4)]
    tags = [step.tag for step in harness.ranks.steps[begin:]]
    chunks = [index for index, tag in enumerate(tags) if tag.startswith("context")]
    if layout == "slots, rows packed":
        assert {tags[index] for index in chunks[:-1]} == {"context_encoding_32"}, "20 of 32, which costs as many"
        assert len(chunks) == 8
    else:
        assert {tags[index] for index in chunks[:-1]} == {"context_encoding_16"}, "the largest of at most 20"
        assert len(chunks) == 10
    assert all(second - first == 2 for first, second in pairwise(chunks)), "one step of tokens each"


async def test_long_prompts_and_running_sequences_at_once(start_engine: StartEngine) -> None:
    """24 requests over 4 slots."""
    harness = await start_engine(EngineConfig(chunks=ChunkLimits(8)), **BUCKETS | LAYOUTS["slots, rows packed"])
    prompts = [[3 + number] * (1 + number * 37 % 120) for number in range(24)]
    events = await asyncio.gather(*(collect(harness.submit(prompt, max_new_tokens=9)) for prompt in prompts))
    assert [tokens_of(one) for one in events] == [expected_tokens(prompt, 9) for prompt in prompts]


async def test_more_sequences_than_rows_take_turns(start_engine: StartEngine) -> None:
    """2 rows a step, 5 slots."""
    executables = make_manifest(**BUCKETS, flags=(*FLAGS, LIVE_ROWS), num_slots=2).executables
    harness = await start_engine(executables=executables, state=make_manifest(num_slots=5).state)
    prompts = [[number, 9, 11] for number in range(5, 13)]
    streams = [harness.submit(prompt, max_new_tokens=20) for prompt in prompts]
    await wait_until(lambda: harness.engine.scheduler.num_running == 5)
    rates = [len(request.output_token_ids) for request in harness.engine.scheduler.running]
    events = await asyncio.gather(*map(collect, streams))
    assert [tokens_of(one) for one in events] == [expected_tokens(prompt, 20) for prompt in prompts]
    assert max(rates) - min(rates) <= 6, "none waits until others have ended"


def test_without_sequences_that_wait_prompts_run_back_to_back() -> None:
    scheduler = make_scheduler(flags=FLAGS, chunks=ChunkLimits(8))
    scheduler.add(make_request("long", 40))
    scheduler.add(make_request("late", 3))
    plans = [run_step(scheduler) for _ in range(5)]
    assert [names(plan) for plan in plans] == [["long"], ["long"], ["long"], ["long"], ["late"]]


def run_steps(scheduler: Scheduler, num_steps: int) -> list[str]:
    """Runs steps; returns what each computed: the prompts by name, or `tokens`."""
    plans = [plan for _ in range(num_steps) if (plan := run_step(scheduler))]
    is_prompt = [plan.executable.submodel == "context_encoding" for plan in plans]
    return [" ".join(names(plan)) if prompts else "tokens" for plan, prompts in zip(plans, is_prompt, strict=True)]


@pytest.mark.parametrize(
    ("flags", "num_sharing"),
    [
        # 20 tokens each, and 16 for a step: 36, 72, 108, and what is left is room for one more.
        ((*FLAGS, LIVE_ROWS), 4),
        # 32 tokens each, and 16 for a step: 48, 96, and one more.
        (FLAGS, 3),
        (DYNAMIC_FLAGS, 3),
    ],
)
def test_short_prompts_share_the_tokens_of_a_chunk(flags: tuple[str, ...], num_sharing: int) -> None:
    shape = {"prompt_buckets": (32, 128), "token_buckets": (256,), "num_slots": 7, "flags": flags}
    scheduler = make_scheduler(chunks=ChunkLimits(128), **shape)
    scheduler.add(make_request("running", 4))
    assert run_steps(scheduler, 2) == ["running", "tokens"]
    for index in range(6):
        scheduler.add(make_request(f"{index}", 20))
    expected = [f"{index}" for index in range(6)]
    expected.insert(num_sharing, "tokens")
    assert run_steps(scheduler, 8) == [*expected, "tokens"]


def test_what_does_not_fit_into_the_rest_of_a_chunk_waits_for_the_next_one() -> None:
    """The rest of a long prompt and a short one share a chunk; no part of a prompt fills it up, and none passes."""
    shape = {"prompt_buckets": (128,), "token_buckets": (256,), "num_slots": 7, "flags": (*FLAGS, LIVE_ROWS)}
    scheduler = make_scheduler(chunks=ChunkLimits(64), **shape)
    scheduler.add(make_request("running", 4))
    assert run_steps(scheduler, 2) == ["running", "tokens"]
    for name, num_tokens in {"long": 64 + 10, "short": 30, "medium": 40, "last": 2}.items():
        scheduler.add(make_request(name, num_tokens))
    steps = ["long", "tokens", "long", "short", "tokens", "medium", "last", "tokens"]
    assert run_steps(scheduler, 8) == steps


def test_rests_behind_cached_prefixes_share_the_tokens_of_a_chunk() -> None:
    scheduler = make_block_scheduler(
        num_blocks=80, num_slots=7, chunks=ChunkLimits(64), prompt_buckets=(64,), token_buckets=(64,)
    )
    scheduler.add(make_request("first", 40))
    assert run_steps(scheduler, 2) == ["first", "tokens"]
    for index in range(4):
        scheduler.add(make_request(f"{index}", 40))
    # 4 tokens each, behind 36 that the first one left.
    assert run_steps(scheduler, 5) == ["0", "1", "2", "3", "tokens"]
