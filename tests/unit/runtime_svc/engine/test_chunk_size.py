"""Chunks of prompts that are chosen by measured times of steps, on a clock that the tests set."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from bundle.abi.inputs import COMPUTED_CONTEXT
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.engines import StartEngine, collect, tokens_of, wait_until
from tests.ranks.fakes import expected_tokens
from tests.ranks.scheduling import make_request, make_scheduler, names, run_step

BUCKETS: dict[str, Any] = {
    "flags": (*DYNAMIC_FLAGS, COMPUTED_CONTEXT),
    "prompt_buckets": (8, 16, 32, 64),
    "token_buckets": (4096,),
}
TOKEN_STEP_S = 0.1


class Served:
    """Prompts that come one after another, while a sequence waits for its tokens.

    Attributes:
        seconds: What a full step of prompts takes, by its tokens a row.
    """

    def __init__(self, seconds: dict[int, float], limits: ChunkLimits) -> None:
        self.seconds = seconds
        self.scheduler = make_scheduler(chunks=limits, **BUCKETS)
        self.scheduler.add(make_request("waits", 3, max_new_tokens=4000))
        self._numbers = count()
        run_step(self.scheduler)

    def compute(self, num_tokens: int) -> list[int]:
        """Computes a prompt of so many tokens; returns those of its chunks."""
        name, chunks = f"{next(self._numbers)}", []
        self.scheduler.add(make_request(name, num_tokens, max_new_tokens=1))
        while sum(chunks) < num_tokens:
            plan = run_step(self.scheduler)
            assert plan is not None
            if names(plan) == [name]:
                width, chunk = plan.executable.bucket[0], plan.rows[0].num_tokens
                chunks.append(chunk)
                self.scheduler.policy.chunk_size.observe(plan, self.seconds[width] * chunk / width)
            else:
                self.scheduler.policy.chunk_size.observe(plan, TOKEN_STEP_S)
        return chunks


LINEAR = {8: 0.1, 16: 0.2, 32: 0.4, 64: 0.8}


@pytest.mark.parametrize(("target_s", "largest"), [(0.05, 8), (0.29, 8), (0.3, 16), (0.51, 32), (0.9, 64)])
def test_a_chunk_and_the_tokens_behind_it_meet_the_target(target_s: float, largest: int) -> None:
    served = Served(LINEAR, ChunkLimits(64, target_s + 1e-9))
    assert served.compute(8 + 3 * largest) == [8, largest, largest, largest], "nothing is measured before the first one"
    assert served.scheduler.policy.chunk_size.tokens == largest


def test_without_a_target_times_change_nothing() -> None:
    served = Served(LINEAR, ChunkLimits(32))
    assert served.compute(100) == [32, 32, 32, 4]


def test_a_chunk_has_no_more_tokens_than_the_server_allows() -> None:
    served = Served(LINEAR, ChunkLimits(32, target_s=5.0))
    assert served.compute(72) == [8, 32, 32]


def test_a_size_that_turns_out_slower_than_expected_is_left_for_a_hundred_prompt_steps() -> None:
    """Twice the tokens take four times as long."""
    served = Served({8: 0.1, 16: 0.4, 32: 1.6, 64: 6.4}, ChunkLimits(64, target_s=0.32))
    chunks = served.compute(8 + 16 + 100 * 8 + 16)
    assert chunks == [8, 16, *[8] * 100, 16]


def test_chunks_shrink_while_steps_become_slower_and_grow_again() -> None:
    served = Served(dict(LINEAR), ChunkLimits(64, target_s=0.52))
    assert served.compute(8 + 32 + 32) == [8, 32, 32]
    served.seconds = {width: 4 * seconds for width, seconds in LINEAR.items()}
    assert served.compute(32 + 16 + 8) == [32, 16, 8]
    served.seconds = dict(LINEAR)
    assert set(served.compute(8 * 120)[-5:]) >= {32}


def test_steps_that_are_not_full_say_nothing_of_a_chunk() -> None:
    served = Served(LINEAR, ChunkLimits(64, target_s=0.3 + 1e-9))
    assert served.compute(3) == [3]
    assert served.scheduler.policy.chunk_size.tokens == 8
    assert served.compute(24) == [8, 16]
    assert served.compute(9) == [9]
    assert served.scheduler.policy.chunk_size.tokens == 16


def test_prompts_without_company_are_computed_whole_and_measured() -> None:
    scheduler = make_scheduler(chunks=ChunkLimits(64, target_s=0.5), **BUCKETS)
    scheduler.add(make_request("alone", 64))
    plan = run_step(scheduler)
    assert plan is not None
    assert plan.rows[0].num_tokens == 64
    scheduler.policy.chunk_size.observe(plan, 0.8)
    assert scheduler.policy.chunk_size.tokens == 32, "half of 0.8 s"


async def test_an_engine_measures_what_its_ranks_tell(start_engine: StartEngine) -> None:
    harness = await start_engine(EngineConfig(chunks=ChunkLimits(64, target_s=0.35)), step_s=0.001, **BUCKETS)
    harness.ranks.told_s = {f"context_encoding_{width}": seconds for width, seconds in LINEAR.items()}
    running = harness.submit([5, 7], max_new_tokens=80)
    await wait_until(lambda: len(harness.ranks.steps) > 4)
    long = [4 + number % 40 for number in range(150)]
    assert tokens_of(await collect(harness.submit(long, max_new_tokens=4))) == expected_tokens(long, 4)
    assert tokens_of(await collect(running)) == expected_tokens([5, 7], 80)
    chunks = [step.tag for step in harness.ranks.steps if step.tag.startswith("context")]
    assert chunks[:3] == ["context_encoding_8", "context_encoding_8", "context_encoding_16"]
    assert set(chunks[2:]) == {"context_encoding_16"}
    assert harness.engine.scheduler.policy.chunk_size.tokens == 16
