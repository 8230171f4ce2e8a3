"""Adapters that an engine writes into the slots of ranks, which say what they compute with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bundle.errors import ResourcesShort
from execution.errors import RankDied, WeightsInvalid
from runtime_svc.engine.adapters import LoadedAdapter
from runtime_svc.engine.engine import EngineState
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.request import Adapter
from runtime_svc.errors import AdapterUnwritable
from tests.ranks.engines import (
    BLOCKS,
    CACHING,
    NEW_BIAS,
    EngineHarness,
    StartEngine,
    collect,
    collect_rest,
    finished_of,
    is_async,
    swap,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import BIAS, expected_tokens

__all__ = ["is_async"]

#: Numbers of adapters by key; of rows without one.
NUMBERS = {"a": 10, "b": 20, "c": 30, "": 0}
#: Of a prompt that takes up two whole blocks and more.
PROMPT = [8] * 9


def load_all(harness: EngineHarness, directory: Path) -> None:
    for key in "abc":
        harness.load_adapter(key, directory, NUMBERS[key])


async def generate(harness: EngineHarness, prompt: list[int], key: str = "", count: int = 12, **options: Any) -> int:
    """Generates with the adapter of a key and checks the tokens; returns how many of the prompt were cached."""
    stream = harness.submit(prompt, max_new_tokens=count, adapter=harness.engine.find_adapter(key), **options)
    events = await collect(stream)
    assert tokens_of(events) == expected_tokens(prompt, count, bias=BIAS + NUMBERS[key])
    return finished_of(events).usage.cached_prompt_tokens


async def test_each_row_has_the_adapter_that_its_request_names(start_engine: StartEngine, tmp_path: Path) -> None:
    """Of more adapters than slots, among them none."""
    harness = await start_engine(num_adapter_slots=2)
    load_all(harness, tmp_path)
    keys = "a b cab c bca  abc"
    await asyncio.gather(
        *(generate(harness, [5 + number], key.strip(), 9 + number % 3) for number, key in enumerate(keys))
    )
    assert {number for _, number in harness.ranks.writes} == {10, 20, 30}
    assert harness.engine.scheduler.statistics.adapter_writes == len(harness.ranks.writes)


async def test_what_is_in_its_slot_is_not_written_again(
    start_engine: StartEngine, tmp_path: Path, *, is_async: bool
) -> None:
    harness = await start_engine(num_adapter_slots=2)
    load_all(harness, tmp_path)
    await asyncio.gather(*(generate(harness, [number], key) for number, key in enumerate("ab ab a", 3) if key != " "))
    assert sorted(harness.ranks.writes) == [(0, 10), (1, 20)]
    await generate(harness, [5])
    await generate(harness, [5], "b")
    assert len(harness.ranks.writes) == 2
    # Such steps are called as if there were no adapters.
    begun = len(harness.ranks.steps)
    await generate(harness, [5], "b", 12)
    assert sum(step.depends_on_previous for step in harness.ranks.steps[begun:]) == 10 * is_async
    await generate(harness, [5], "c")
    assert harness.ranks.writes[2:] == [(0, 30)], "one slot of one adapter"


async def test_a_write_comes_between_two_steps(start_engine: StartEngine, tmp_path: Path) -> None:
    """The fake refuses one beside a step. Steps run until it begins, and what it writes is there in the next one."""
    harness = await start_engine(num_adapter_slots=1)
    load_all(harness, tmp_path)
    ranks = harness.ranks
    running = harness.submit([3], max_new_tokens=40)
    await wait_until(lambda: len(ranks.steps) >= 4)
    ranks.write_gate.clear()
    adapted = asyncio.create_task(generate(harness, [5], "a"))
    await wait_until(lambda: harness.engine.scheduler.num_running == 2)
    num_steps = len(ranks.steps)
    await asyncio.sleep(0.02)
    assert (len(ranks.steps), ranks.is_running) == (num_steps, False)
    ranks.write_gate.set()
    await adapted
    assert ranks.steps[num_steps].tag.startswith("context"), "the step that waited for it"
    assert tokens_of(await collect(running)) == expected_tokens([3], 40)


@pytest.mark.parametrize("what", ["close", "abort", "unload", "deadline"])
async def test_what_happens_while_ranks_write(start_engine: StartEngine, tmp_path: Path, what: str) -> None:
    harness = await start_engine(num_adapter_slots=1, **BLOCKS)
    load_all(harness, tmp_path)
    engine, ranks = harness.engine, harness.ranks
    ranks.write_gate.clear()
    first = harness.submit(
        PROMPT,
        request_id="first",
        adapter=engine.find_adapter("a"),
        deadline_s=0.1 if what == "deadline" else None,
        max_new_tokens=12,
    )
    # A slow host may have reached the deadline already.
    await wait_until(lambda: engine.scheduler.num_running == 1 or first.finished is not None)
    if what == "close":
        first.close()
    elif what == "abort":
        engine.requests.abort("first", "a test")
    elif what == "unload":
        engine.unload_adapter("a")
        assert engine.find_adapter("a") is None
    else:
        await collect_rest(first)
    ranks.write_gate.set()
    if what == "unload":
        assert tokens_of(await collect(first)) == expected_tokens(PROMPT, 12, bias=BIAS + 10)
    await generate(harness, PROMPT, "b")
    await generate(harness, PROMPT)
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("ctx_batch_size", [1, 4])
async def test_an_adapter_whose_file_is_gone_ends_its_requests_alone(
    start_engine: StartEngine, tmp_path: Path, ctx_batch_size: int
) -> None:
    harness = await start_engine(num_adapter_slots=2, ctx_batch_size=ctx_batch_size)
    load_all(harness, tmp_path)
    engine, path = harness.engine, tmp_path / "adapter-10"
    await engine.check_adapter({0: path})
    path.unlink()
    with pytest.raises(WeightsInvalid):
        await engine.check_adapter({0: path})
    others = [asyncio.create_task(generate(harness, [number], key, 30)) for number, key in enumerate(["", "b"], 3)]
    await asyncio.sleep(0)
    # One may start in the step of others, and two find no room.
    failed = [harness.submit_call([7], 2, adapter=engine.find_adapter("a")) for _ in range(3)]
    for stream in failed:
        ends = [event.payload for event in [event async for event in stream]][-2:]
        for end in ends:
            assert isinstance(end.finish.error, AdapterUnwritable)
            assert str(end.finish.error).startswith("adapter 'a' cannot be written to the ranks: the weight file of ")
    await asyncio.gather(*others)
    described = [engine.describe_adapter(key) for key in ("a", "b", "c")]
    assert [one and one.slot for one in described] == [None, 0, None]
    path.write_text("10")
    await generate(harness, [7], "a")
    assert engine.state is EngineState.READY


async def test_ranks_that_lack_memory_for_a_file_serve_on(start_engine: StartEngine, tmp_path: Path) -> None:
    harness = await start_engine(num_adapter_slots=1)
    load_all(harness, tmp_path)
    await generate(harness, [5], "a")
    harness.ranks.write_failures = [ResourcesShort("memory", "rank 0 maps no file", 1.0)]
    events = await collect(harness.submit([5], adapter=harness.engine.find_adapter("b")))
    assert isinstance(finished_of(events).finish.error, AdapterUnwritable)
    assert harness.engine.scheduler.adapters.num_used_slots == 0
    for key in "ab":
        await generate(harness, [5], key)
    assert harness.ranks.writes == [(0, 10), (0, 10), (0, 20)]


async def test_ranks_that_are_lost_while_they_write_are_written_anew(start_engine: StartEngine, tmp_path: Path) -> None:
    harness = await start_engine(num_adapter_slots=1)
    load_all(harness, tmp_path)
    await generate(harness, [5], "a")
    first = harness.ranks
    first.write_gate.clear()
    lost = harness.submit([5], max_new_tokens=3, adapter=harness.engine.find_adapter("b"))
    # It wants the slot that the others do.
    waiting = asyncio.create_task(generate(harness, [6], "a"))
    await wait_until(lambda: harness.engine.scheduler.num_running > 0)
    await harness.lose_ranks()
    assert isinstance(finished_of(await collect(lost)).finish.error, RankDied)
    await waiting
    await generate(harness, [7], "b")
    assert first.writes == [(0, 10)]
    assert harness.ranks.adapters == {0: 20}


async def test_adapters_share_no_keys_and_no_sessions_beyond_equal_ones(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    harness = await start_engine(num_adapter_slots=2, **CACHING)
    load_all(harness, tmp_path)
    for cached in (0, 8):
        for key in NUMBERS:
            assert await generate(harness, PROMPT, key) == cached
    # Another name of the same numbers.
    harness.engine.load_adapter("again", Adapter("again", "10"), {0: tmp_path / "adapter-10"})
    events = await collect(harness.submit(PROMPT, max_new_tokens=3, adapter=harness.engine.find_adapter("again")))
    assert finished_of(events).usage.cached_prompt_tokens == 8
    # A session that goes on with another adapter computes all anew.
    turn = [*PROMPT, *expected_tokens(PROMPT, 12, bias=BIAS + 10), 3]
    assert await generate(harness, PROMPT, "a", session="s", cache_salt="x") == 0
    assert await generate(harness, turn, "b", session="s", cache_salt="x") == 0
    assert await generate(harness, turn, "b", session="s", cache_salt="x") > 0


async def test_a_key_that_gets_other_numbers_leaves_requests_the_old_ones(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    harness = await start_engine(num_adapter_slots=2, num_slots=2, **CACHING)
    load_all(harness, tmp_path)
    assert await generate(harness, PROMPT, "a") == 0
    adapter = harness.engine.find_adapter("a")
    before = [harness.submit(PROMPT, max_new_tokens=30, adapter=adapter) for _ in range(4)]
    await wait_until(lambda: harness.engine.scheduler.num_running == 2)
    harness.load_adapter("a", tmp_path, 40)
    after = harness.submit(PROMPT, max_new_tokens=30, adapter=harness.engine.find_adapter("a"))
    assert harness.engine.describe_adapter("a") == LoadedAdapter("a", Adapter("a", "40"), None, 1)
    for stream in before:
        events = await collect(stream)
        assert tokens_of(events) == expected_tokens(PROMPT, 30, bias=BIAS + 10)
        assert finished_of(events).usage.cached_prompt_tokens == 8
    events = await collect(after)
    assert tokens_of(events) == expected_tokens(PROMPT, 30, bias=BIAS + 40)
    assert finished_of(events).usage.cached_prompt_tokens == 0
    assert not harness.engine.scheduler.adapters.is_loaded("10")


async def test_adapters_outlast_a_swap_of_the_weights(
    start_engine: StartEngine, tmp_path: Path, shards: dict[int, Path]
) -> None:
    harness = await start_engine(num_adapter_slots=2)
    load_all(harness, tmp_path)
    await generate(harness, [5], "a")
    await (await swap(harness, shards, InFlightPolicy.WAIT))
    events = await collect(harness.submit([5], max_new_tokens=9, adapter=harness.engine.find_adapter("a")))
    assert tokens_of(events) == expected_tokens([5], 9, bias=NEW_BIAS + 10)
    assert harness.ranks.writes == [(0, 10)]
