"""The mask of a row is that of its sequence's next token, whatever computes it; and no one waits for another's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle, repeat
from typing import Any

import msgspec
import pytest

from bundle.errors import KilnError
from bundle.manifest import Serving
from execution.text.constraint import Constraint
from execution.text.errors import TextProcessLost
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from runtime_svc.engine.events import TokenDelta
from runtime_svc.engine.request import FinishReason
from runtime_svc.errors import ConstraintFailed
from runtime_svc.text.constraints import ConstrainedOutput
from tests.bundles.manifests import DYNAMIC
from tests.ranks.engines import (
    BLOCKS,
    EngineHarness,
    StartEngine,
    collect,
    generated_of,
    is_async,
    letters,
    start_engine,
    tokens_of,
)
from tests.ranks.fakes import VOCAB_SIZE, expected_tokens

__all__ = ["is_async", "start_engine"]

DEVICE: dict[str, Any] = BLOCKS | {"on_device": True}
HOST: dict[str, Any] = BLOCKS | {"sampling": msgspec.structs.replace(DYNAMIC, mode="host")}
CONSTRAINT = Constraint(kind="regex", text="whatever the masks say")
LOST = TextProcessLost("finding masks", "a test says so")


def mask_of(number: int, index: int) -> bytes:
    """Allows one token, another at each index of each sequence."""
    token = tokens_of_sequence(number, index + 1)[-1]
    return bytes(1 << token % 8 if at == token // 8 else 0 for at in range(4 * -(-VOCAB_SIZE // 32)))


def tokens_of_sequence(number: int, count: int) -> list[int]:
    return [(5 + 100 * number + 3 * index) % VOCAB_SIZE for index in range(count)]


def constrain(number: int) -> ConstrainedOutput:
    return ConstrainedOutput(CONSTRAINT, number, mask_of(number, 0))


class Follower:
    """Knows the masks, but for those of sequences that are late, which it finds at the second call, or never.

    It forces the next `num_forced` tokens each time.
    """

    def __init__(self, harness: EngineHarness, num_forced: int = 0) -> None:
        self._num_forced = num_forced
        #: Seconds that masks take, in turns.
        self.delays_s: Iterator[float] = repeat(0.0)
        self.late: set[int] = set()
        self.stuck: set[int] = set()
        self.failing: dict[int, KilnError] = {}
        self.raising: dict[int, Exception] = {}
        self.ended: list[int] = []
        constraints = harness.engine.requests.constraints
        constraints.follow = self.follow
        constraints.on_end = lambda output: self.ended.append(output.number)

    async def follow(self, outputs: Sequence[tuple[ConstrainedOutput, Sequence[int]]]) -> list[KilnError | None]:
        await asyncio.sleep(next(self.delays_s))
        for output, _ in outputs:
            if output.number in self.raising:
                raise self.raising[output.number]
        for output, tokens in outputs:
            assert output.mask is None, "it was asked for"
            if output.number in self.late:
                self.late.discard(output.number)
            elif output.number not in self.stuck:
                length = len(tokens) + self._num_forced
                output.forced = tokens_of_sequence(output.number, length)[len(tokens) :]
                output.mask = mask_of(output.number, length)
        return [self.failing.get(output.number) for output, _ in outputs]


@pytest.mark.parametrize("num_forced", [0, 2, 7])
@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        (HOST, ChunkLimits()),
        (HOST, ChunkLimits(max_tokens=4)),
        (DEVICE, ChunkLimits(max_tokens=4)),
        (HOST | {"num_blocks": 16, "num_slots": 4}, ChunkLimits()),
        (DEVICE | {"num_blocks": 16, "num_slots": 4}, ChunkLimits()),
        (HOST | {"num_blocks": 16, "num_slots": 4, "serving": Serving(prefix_caching=True)}, ChunkLimits()),
    ],
    ids=["whole", "chunked", "on_device", "preempted", "preempted_on_device", "cached"],
)
async def test_masks_are_those_of_the_next_token(
    start_engine: StartEngine, options: dict[str, Any], chunks: ChunkLimits, num_forced: int
) -> None:
    harness = await start_engine(EngineConfig(chunks=chunks), **options)
    follower = Follower(harness, num_forced)
    prompts = [[number + 5] * 13 for number in range(4)]
    streams = [harness.submit(one, max_new_tokens=30, constrained=constrain(at)) for at, one in enumerate(prompts[:3])]
    streams.append(harness.submit(prompts[3], max_new_tokens=30))
    answers = [tokens_of(events) for events in await asyncio.gather(*map(collect, streams))]
    assert answers == [*(tokens_of_sequence(at, 30) for at in range(3)), expected_tokens(prompts[3], 30)]
    assert bool(harness.engine.scheduler.statistics.preemptions) == ("num_slots" in options)
    assert sorted(follower.ended) == [0, 1, 2]


async def test_a_session_goes_on_with_a_constraint(start_engine: StartEngine) -> None:
    harness = await start_engine(**HOST)
    Follower(harness)
    first = await collect(harness.submit([5, 6, 7], max_new_tokens=6, session="s", constrained=constrain(0)))
    prompt = [5, 6, 7, *tokens_of(first), 11]
    second = await collect(harness.submit(prompt, max_new_tokens=4, session="s", constrained=constrain(1)))
    assert harness.engine.scheduler.statistics.session_tokens
    assert (tokens_of(first), tokens_of(second)) == (tokens_of_sequence(0, 6), tokens_of_sequence(1, 4))


def count_steps(harness: EngineHarness) -> Counter[str]:
    return Counter({key.submodel: count for key, count in harness.engine.scheduler.statistics.steps.items()})


@pytest.mark.parametrize("options", [HOST, DEVICE], ids=["host", "device"])
async def test_forced_tokens_cost_one_step_together(start_engine: StartEngine, options: dict[str, Any]) -> None:
    """They come at once, and are computed with the token before, as the last part of a prompt."""
    harness = await start_engine(**options)
    Follower(harness, num_forced=5)
    events = await collect(harness.submit([5, 6, 7], max_new_tokens=13, constrained=constrain(0)))
    assert tokens_of(events) == tokens_of_sequence(0, 13)
    assert count_steps(harness) == {"context_encoding": 3}
    deltas = [event.payload.tokens for event in events if isinstance(event.payload, TokenDelta)]
    assert [len(tokens) for tokens in deltas] == [6, 6, 1]
    usage = events[-1].payload.usage
    assert (usage.generated_tokens, usage.kv_tokens) == (13, 15)


@pytest.mark.parametrize("options", [{"top_logprobs": 0}, {"top_logprobs": 2}], ids=["logprobs", "alternatives"])
async def test_forced_tokens_with_numbers_have_a_step_each(start_engine: StartEngine, options: dict[str, Any]) -> None:
    harness = await start_engine(**HOST)
    Follower(harness, num_forced=5)
    events = await collect(harness.submit([5, 6, 7], max_new_tokens=13, constrained=constrain(0), **options))
    assert tokens_of(events) == tokens_of_sequence(0, 13)
    assert all(token.logprob is not None for token in generated_of(events))
    assert count_steps(harness) == {"context_encoding": 1, "token_generation": 12}


async def test_a_forced_token_is_no_reason_for_a_step_that_many_wait_for(start_engine: StartEngine) -> None:
    harness = await start_engine(**HOST | {"num_slots": 4})
    Follower(harness, num_forced=2)
    streams = [harness.submit([5, number], max_new_tokens=20) for number in range(3)]
    streams.append(harness.submit([5, 6], max_new_tokens=18, constrained=constrain(0)))
    answers = [tokens_of(events) for events in await asyncio.gather(*map(collect, streams))]
    assert answers == [*(expected_tokens([5, number], 20) for number in range(3)), tokens_of_sequence(0, 18)]
    assert count_steps(harness)["context_encoding"] == 4


async def test_a_prompt_does_not_wait_for_forced_tokens(start_engine: StartEngine) -> None:
    harness = await start_engine(**HOST)
    Follower(harness, num_forced=7)
    streams = [harness.submit([5, 6, 7], constrained=constrain(0)), harness.submit([8] * 9, max_new_tokens=2)]
    await asyncio.gather(*map(collect, streams))
    prefills = [step.inputs["num_tokens"][0] for step in harness.ranks.steps if step.tag.startswith("context")]
    assert prefills[:2] == [3, 9]


@pytest.mark.parametrize(
    ("options", "reason", "count"),
    [
        ({"max_new_tokens": 4}, FinishReason.LENGTH, 4),
        ({"max_new_tokens": 6}, FinishReason.LENGTH, 6),
        ({"stop_token_ids": (tokens_of_sequence(0, 3)[-1],)}, FinishReason.STOP_TOKEN, 3),
        ({"stop_strings": (letters(tokens_of_sequence(0, 4)[-2:]),)}, FinishReason.STOP_STRING, 4),
        ({"stop_strings": (letters(tokens_of_sequence(0, 1)),)}, FinishReason.STOP_STRING, 1),
    ],
    ids=["length", "length_of_all", "stop_token", "stop_string", "stop_string_before"],
)
async def test_a_sequence_ends_among_forced_tokens(
    start_engine: StartEngine, options: dict[str, Any], reason: FinishReason, count: int
) -> None:
    harness = await start_engine(**HOST)
    follower = Follower(harness, num_forced=5)
    events = await collect(harness.submit([5, 6, 7], session="s", constrained=constrain(0), **options))
    finished = events[-1].payload
    assert finished.finish.reason is reason
    assert (tokens_of(events), finished.usage.generated_tokens) == (tokens_of_sequence(0, count), count)
    assert count_steps(harness) == {"context_encoding": 1}
    assert follower.ended == [0]
    # The session keeps what was computed, and no more.
    again = await collect(harness.submit([5, 6, 7, *tokens_of(events)], max_new_tokens=4, session="s"))
    assert tokens_of(again) == expected_tokens([5, 6, 7, *tokens_of(events)], 4)


async def test_a_row_whose_mask_is_late_holds_up_no_other(start_engine: StartEngine) -> None:
    harness = await start_engine(**HOST)
    follower = Follower(harness)
    follower.stuck.add(0)
    stuck = asyncio.create_task(collect(harness.submit([5, 6], max_new_tokens=8, constrained=constrain(0))))
    others = [
        harness.submit([7, 8], max_new_tokens=20),
        harness.submit([9], max_new_tokens=20, constrained=constrain(1)),
    ]
    plain, constrained = [tokens_of(events) for events in await asyncio.gather(*map(collect, others))]
    assert (plain, constrained) == (expected_tokens([7, 8], 20), tokens_of_sequence(1, 20))
    assert not stuck.done()
    follower.stuck.clear()
    assert tokens_of(await stuck) == tokens_of_sequence(0, 8)


@pytest.mark.parametrize("delays_s", [(0.005,), (0.0, 0.03, 0.002, 0.05)], ids=["in_time", "in_time_or_not"])
@pytest.mark.parametrize(
    "options",
    [HOST, DEVICE, HOST | {"num_blocks": 16}, HOST | {"serving": Serving(prefix_caching=True)}],
    ids=["host", "device", "preempted", "cached"],
)
async def test_masks_of_many_are_found_while_a_step_runs(
    start_engine: StartEngine, options: dict[str, Any], delays_s: tuple[float, ...]
) -> None:
    """A row whose mask comes later computes its newest token again. Others wait for none."""
    harness = await start_engine(**options | {"num_slots": 8})
    harness.ranks.step_s = 0.015
    follower = Follower(harness)
    follower.delays_s = cycle(delays_s)
    streams = [harness.submit([5] * 13, max_new_tokens=12, constrained=constrain(number)) for number in range(6)]
    streams.append(harness.submit([7] * 13, max_new_tokens=12))
    answers = [tokens_of(events) for events in await asyncio.gather(*map(collect, streams))]
    assert answers == [*(tokens_of_sequence(number, 12) for number in range(6)), expected_tokens([7] * 13, 12)]
    is_preempted = options.get("num_blocks") == 16
    assert bool(harness.engine.scheduler.statistics.preemptions) == is_preempted
    assert max(map(len, harness.ranks.picked)) > (0 if is_preempted else 4)
    assert harness.ranks.num_chained_picks > 0


@pytest.mark.parametrize("count", [None, 0, 2])
async def test_what_is_told_of_tokens_that_are_picked_late(start_engine: StartEngine, count: int | None) -> None:
    harness = await start_engine(**HOST | {"num_slots": 8})
    harness.ranks.step_s = 0.01
    Follower(harness).delays_s = repeat(0.004)
    streams = [
        harness.submit([5], max_new_tokens=4, top_logprobs=count, constrained=constrain(number)) for number in range(6)
    ]
    answers = await asyncio.gather(*map(collect, streams))
    assert [tokens_of(events) for events in answers] == [tokens_of_sequence(number, 4) for number in range(6)]
    told = [len(token.top_logprobs) for events in answers for token in generated_of(events)]
    assert told == [count or 0] * 24
    assert harness.ranks.picked


async def test_an_engine_whose_ranks_cannot_pick_waits_for_masks(start_engine: StartEngine) -> None:
    flags = [flag for flag in DEVICE["flags"] if flag != "logits"]
    harness = await start_engine(**DEVICE | {"num_slots": 8, "flags": flags})
    harness.ranks.step_s = 0.01
    Follower(harness).delays_s = repeat(0.004)
    streams = [harness.submit([5], max_new_tokens=6, constrained=constrain(number)) for number in range(6)]
    answers = await asyncio.gather(*map(collect, streams))
    assert [tokens_of(events) for events in answers] == [tokens_of_sequence(number, 6) for number in range(6)]
    assert not harness.ranks.picked


async def test_a_mask_that_takes_longer_is_asked_for_again(start_engine: StartEngine) -> None:
    harness = await start_engine(**HOST)
    Follower(harness).late.add(0)
    assert tokens_of(
        await collect(harness.submit([5], max_new_tokens=5, constrained=constrain(0)))
    ) == tokens_of_sequence(0, 5)


async def test_a_sequence_whose_masks_cannot_be_found_ends_alone(start_engine: StartEngine) -> None:
    harness = await start_engine(**HOST)
    Follower(harness).failing[0] = LOST
    streams = [harness.submit([5], max_new_tokens=5, constrained=constrain(number)) for number in range(2)]
    failed, fine = await asyncio.gather(*map(collect, streams))
    assert failed[-1].payload.finish.reason is FinishReason.ERROR
    assert failed[-1].payload.finish.error is LOST
    assert tokens_of(failed) == tokens_of_sequence(0, 1)
    assert tokens_of(fine) == tokens_of_sequence(1, 5)


@pytest.mark.parametrize("error", [LOST, ZeroDivisionError("a bug")], ids=["named", "bug"])
async def test_a_call_for_masks_that_fails_ends_the_sequence_that_it_fails_for(
    start_engine: StartEngine, error: Exception
) -> None:
    harness = await start_engine(**HOST)
    follower, reported = Follower(harness), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    follower.raising[1] = error
    streams = [harness.submit([5], max_new_tokens=5, constrained=constrain(number)) for number in range(3)]
    answers = await asyncio.gather(*map(collect, streams))
    assert [tokens_of(events) for events in answers] == [tokens_of_sequence(at, 1 if at == 1 else 5) for at in range(3)]
    finish = answers[1][-1].payload.finish
    assert finish.reason is FinishReason.ERROR
    assert sorted(follower.ended) == [0, 1, 2]
    if error is LOST:
        assert finish.error is LOST
        assert not reported
    else:
        assert isinstance(finish.error, ConstraintFailed)
        assert (finish.error.code, finish.error.cause) == ("INTERNAL", "ZeroDivisionError")
        assert set(reported) == {error}


async def test_tokens_that_end_are_allowed_with_the_mask_alone(start_engine: StartEngine) -> None:
    """Rows without a constraint are called ahead again once none with one runs."""
    harness = await start_engine(**HOST)
    follower = Follower(harness)
    stopping = tokens_of_sequence(0, 3)[-1]
    events = await collect(harness.submit([5], constrained=constrain(0), stop_token_ids=(stopping,)))
    assert tokens_of(events) == tokens_of_sequence(0, 3)
    assert events[-1].payload.finish.reason is FinishReason.STOP_TOKEN
    assert follower.ended == [0]
    assert not harness.engine.requests.constraints.running
