"""What the benchmark's clients measure, on a runtime whose ranks take a time of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench.crowd import crowd
from bench.streams import prefixes
from bench.worker import Worker, WorkerFailed
from bundle.abi.inputs import COMPUTED_CONTEXT
from bundle.manifest import Serving
from tests.servers.runtime import Runtime, serve_runtime

STEP_S = 0.01
CROWD: dict[str, Any] = {"deployment": "d", "streams": 2, "context": 4, "steps": 5, "prompt": 32}
BUCKETS = {"num_slots": 3, "prompt_buckets": (8, 64), "token_buckets": (256,)}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with serve_runtime(tmp_path, "--max-chunk-tokens=8") as runtime:
        runtime.step_s = STEP_S
        yield runtime


async def test_a_prompt_in_chunks_delays_a_crowd_by_one_at_a_time(served: Runtime) -> None:
    await served.deploy(**BUCKETS, flags=(COMPUTED_CONTEXT,))
    measured = await asyncio.to_thread(crowd, address=served.address, **CROWD, max_tokens=200)
    # Four chunks, and a step of the streams behind each but the last.
    assert measured["first_s"] >= 6 * STEP_S
    assert len(measured["calm"]) >= 2 * 3
    assert len(measured["crowded"]) >= 2 * 4
    middle = len(measured["crowded"]) // 2
    assert sorted(measured["crowded"])[middle] >= 1.8 * STEP_S, "a chunk and a step"
    await served.wait_for_slots(0)


async def test_streams_that_end_before_the_prompt_has_a_token_are_an_error(served: Runtime) -> None:
    await served.deploy(**BUCKETS, flags=(COMPUTED_CONTEXT,))
    with pytest.raises(ValueError, match="ended within 6 tokens"):
        await asyncio.to_thread(crowd, address=served.address, **CROWD, max_tokens=6)


@pytest.mark.parametrize("is_cached", [True, False])
async def test_prompts_share_their_beginning_only_if_they_may(served: Runtime, is_cached: bool) -> None:
    blocks = {"num_blocks": 64, "block_tokens": 4, "serving": Serving(prefix_caching=True)}
    flags = (COMPUTED_CONTEXT, "block_kv")
    await served.deploy(**BUCKETS | blocks, flags=flags)
    options = {"address": served.address, "deployment": "d", "shared": 16, "own": 8, "prompts": 3}
    for _ in range(2):
        measured = await asyncio.to_thread(prefixes, **options, is_cached=is_cached)
        assert measured["cached"] == [16.0 if is_cached else 0.0] * 3
        assert len(measured["firsts"]) == 3


def test_a_worker_that_does_not_answer_is_ended() -> None:
    # Reads its input to the end before it answers.
    with Worker("json.tool") as worker:
        with pytest.raises(WorkerFailed, match="prefill: no answer within 0 s"):
            worker.call("prefill", timeout_s=0.2)
        assert not worker.is_running
        with pytest.raises(WorkerFailed, match="the process ended"):
            worker.call("prefill")
