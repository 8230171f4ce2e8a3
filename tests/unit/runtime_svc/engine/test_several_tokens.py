"""Steps that give several tokens a row, or none: what becomes of them in events and usage."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from execution.step import Step, StepResult
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.events import Event, Finished, GeneratedToken, TokenDelta
from runtime_svc.engine.request import Finish, FinishReason, Request
from runtime_svc.engine.requests import RequestTable
from runtime_svc.engine.streams import OutputStream, StepOutcome, StepOutput
from runtime_svc.text.codec import SequenceText
from tests.ranks.engines import (
    LetterTokenizer,
    StartEngine,
    collect,
    collect_rest,
    finished_of,
    generated_of,
    letters,
    text_of,
    tokens_of,
)
from tests.ranks.fakes import FakeRanks, expected_tokens
from tests.ranks.launchers import FakeLauncher
from tests.ranks.scheduling import make_request, make_scheduler

A, B, C, D = 26, 27, 28, 29


class Table:
    """One request in a table of its own; the test is the ranks."""

    def __init__(self, request: Request, *, stop_strings: tuple[str, ...] = ()) -> None:
        self.scheduler = make_scheduler(num_slots=1)
        self.requests = RequestTable(self.scheduler, EngineConfig(queue_capacity=1), wake=lambda: None)
        self.request = request
        text = SequenceText(LetterTokenizer(), stop_strings)  # type: ignore[arg-type]
        stream = self.requests.submit([request], [text], deadline_s=None)
        assert isinstance(stream, OutputStream)
        self.stream = stream

    def run_step(self, outcome: StepOutcome) -> None:
        """A step of which the request has row 0."""
        plan = self.scheduler.schedule()
        assert plan is not None
        rows = self.scheduler.update(plan, outcome.tokens, 1.0)
        self.requests.add_output(StepOutput(rows, outcome))
        self.requests.publish()
        self.scheduler.check_integrity()

    async def finish(self) -> tuple[list[GeneratedToken], list[Event]]:
        """Every token that was published, and all events."""
        self.requests.end_all(lambda _: Finish(FinishReason.ABORTED))
        events = await collect(self.stream)
        return generated_of(events), events


async def test_tokens_of_a_step_are_one_event() -> None:
    table = Table(make_request("a", 3))
    events = [await anext(table.stream)]
    for outcome in (StepOutcome([[A]]), StepOutcome([[B, C]])):
        table.run_step(outcome)
        # In time, because what waits is joined.
        events.append(await anext(table.stream))
    table.requests.end_all(lambda _: Finish(FinishReason.ABORTED))
    events += await collect_rest(table.stream)
    assert [(token.token_id, token.text) for token in generated_of(events)] == [(A, "a"), (B, "b"), (C, "c")]
    assert [event.payload.text for event in events if isinstance(event.payload, TokenDelta)] == ["a", "bc"]
    assert finished_of(events).usage.generated_tokens == 3


async def test_a_step_without_a_token_is_no_event() -> None:
    table = Table(make_request("a", 3))
    table.run_step(StepOutcome([[]]))
    table.run_step(StepOutcome([[A]]))
    tokens, events = await table.finish()
    assert [token.token_id for token in tokens] == [A]
    assert len(events) == 3
    assert sum(one.steps for one in finished_of(events).usage.buckets) == 2, "both steps were computed"


async def test_each_token_has_its_own_logprobs_and_logits() -> None:
    request = make_request("a", 3)
    request.top_logprobs, request.wants_logits = 1, True
    logits = [memoryview(array("f", [index])) for index in range(2)]
    table = Table(request)
    table.run_step(
        StepOutcome(
            [[A, B]],
            [[-1.0, -2.0]],
            [[[A, C], [B, D]]],
            [[[-1.0, -3.0], [-2.0, -4.0]]],
            logits=[[logits[0], logits[1]]],
        )
    )
    tokens, _ = await table.finish()
    assert [token.logprob for token in tokens] == [-1.0, -2.0]
    assert [[(one.token_id, one.logprob) for one in token.top_logprobs] for token in tokens] == [
        [(A, -1.0)],
        [(B, -2.0)],
    ]
    assert [token.logits for token in tokens] == logits


@pytest.mark.parametrize("stop_token_ids", [(), (D,)])
@pytest.mark.parametrize("given", [[A, B, C, D], [A, B, C]])
async def test_a_stop_string_drops_the_tokens_behind(stop_token_ids: Sequence[int], given: list[int]) -> None:
    """Also if a later token of the same step would have stopped the sequence."""
    table = Table(make_request("a", 3, stop=stop_token_ids), stop_strings=("b",))
    table.run_step(StepOutcome([given]))
    tokens, events = await table.finish()
    assert [token.token_id for token in tokens] == [A, B]
    assert text_of(events) == "a"
    assert finished_of(events).finish == Finish(FinishReason.STOP_STRING, stop_string="b")
    assert finished_of(events).usage.generated_tokens == 2
    assert table.scheduler.num_running == 0


def test_an_outcome_has_the_tokens_of_each_row_of_a_result() -> None:
    logits = memoryview(array("f", range(6))).cast("B").cast("f", [2, 3])
    result = StepResult([[7], [8]], [[-0.5], [-1.5]], [[[7]], [[9]]], [[[-0.5]], [[-0.25]]], 0.0, logits)
    outcome = StepOutcome.from_result(result)
    assert (outcome.tokens, outcome.logprobs) == ([[7], [8]], [[-0.5], [-1.5]])
    assert (outcome.top_ids, outcome.top_logprobs) == ([[[7]], [[9]]], [[[-0.5]], [[-0.25]]])
    assert outcome.logits is not None
    assert [[one.tolist() for one in row] for row in outcome.logits] == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]
    several = StepResult([[7, 9], [8]], None, None, None, 0.0, memoryview(bytearray(48)).cast("f", [2, 2, 3]))
    logits_of_several = StepOutcome.from_result(several).logits
    assert logits_of_several is not None
    assert [[len(one) for one in row] for row in logits_of_several] == [[3, 3], [3, 3]]
    assert StepOutcome.from_result(StepResult([[7, 9], []], None, None, None, 0.0)) == StepOutcome([[7, 9], []])


# In the engine


class DraftingRanks(FakeRanks):
    """Give up to three tokens in a token_generation step, as many as the newest token says; none now and then."""

    async def _run(self, step: Step, before: asyncio.Future[StepResult] | None) -> StepResult:
        result = await super()._run(step, before)
        num_rows = len(result.tokens)
        if step.tag.startswith("context"):
            return result
        rows: list[list[int]] = [[] for _ in range(num_rows)]
        for row in range(num_rows):
            slot, position = int(step.inputs["seq_ids"][row]), int(step.inputs["position_ids"][row])
            (token,) = result.tokens[row]
            # A row that gave no token comes again, with another number.
            count = (token + len(self.steps)) % 4
            for index in range(count):
                rows[row].append(token)
                if position + index + 1 < len(self._kv[slot]):
                    self._kv[slot][position + index + 1] = token
                token = self._next(step, row, self._kv[slot][: position + index + 2])
        return msgspec.structs.replace(result, tokens=rows)


@pytest.mark.parametrize("is_async", [False])
async def test_streams_of_ranks_that_give_several_tokens_are_those_of_one_by_one(
    start_engine: StartEngine,
) -> None:
    harness = await start_engine(make_launcher=partial(FakeLauncher, make_ranks=DraftingRanks), num_slots=3)
    prompts = [[5], [7, 8], [3, 4, 9, 1], [11] * 8, [40, 2]]
    streams = [harness.submit(prompt, max_new_tokens=30) for prompt in prompts]
    # At once, because the events of a reader that is late are joined.
    for prompt, events in zip(prompts, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens_of(events) == expected_tokens(prompt, 30)
        assert text_of(events) == letters(expected_tokens(prompt, 30))
        assert finished_of(events).usage.generated_tokens == 30
    sizes = {len(event.payload.tokens) for event in events if isinstance(event.payload, TokenDelta)}
    assert sizes == {1, 2, 3}
    whole = letters(expected_tokens([5], 30))
    for length in range(3, 12):
        events = await collect(harness.submit([5], max_new_tokens=30, stop_strings=(whole[length - 2 : length],)))
        payload = events[-1].payload
        assert isinstance(payload, Finished)
        assert payload.finish.reason is FinishReason.STOP_STRING
        end = whole.index(whole[length - 2 : length])
        assert text_of(events) == whole[:end]
        assert len(tokens_of(events)) == payload.usage.generated_tokens == end + 2
