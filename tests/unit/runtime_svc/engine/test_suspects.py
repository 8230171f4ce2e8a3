"""Prompts that take ranks down: which are refused, which run alone, and which pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from execution.errors import RankHung
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.request import Adapter
from runtime_svc.engine.streams import OutputStream
from runtime_svc.engine.suspects import EXPIRY_S, MAX_SUSPECTS, SuspectPrompts
from runtime_svc.errors import PromptQuarantined
from tests.ranks.engines import NEW_BIAS, EngineHarness, StartEngine, collect, finished_of, swap, tokens_of, wait_until
from tests.ranks.fakes import expected_tokens
from tests.ranks.scheduling import make_request

GUILTY, INNOCENT, OTHER = [5], [6], [7]
#: Slow enough for a look between two steps.
STEP_S = 0.002


async def lose_ranks(harness: EngineHarness, *prompts: list[int]) -> list[OutputStream]:
    """Loses the ranks while they compute the next token of all these prompts in one step."""
    streams = [harness.submit(prompt) for prompt in prompts]
    await wait_until(lambda: all(len(stream._events) > 2 for stream in streams))
    await harness.hold()
    await harness.lose_ranks()
    return streams


async def generate(harness: EngineHarness, prompt: list[int]) -> None:
    assert tokens_of(await collect(harness.submit(prompt, max_new_tokens=9))) == expected_tokens(prompt, 9)


async def test_a_prompt_over_which_ranks_are_lost_twice_is_refused(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=STEP_S)
    for _ in range(2):
        await lose_ranks(harness, GUILTY)
    with pytest.raises(PromptQuarantined, match="were lost 2 times") as caught:
        harness.submit(GUILTY, seed=9, max_new_tokens=1)
    assert int(caught.value.metadata["expires_in_s"]) > EXPIRY_S - 60
    assert harness.engine.scheduler.statistics.quarantined_requests == 1
    await generate(harness, INNOCENT)
    await collect(harness.submit(GUILTY, temperature=1.0, max_new_tokens=2))


async def test_mates_of_different_guilty_prompts_are_not_refused(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=STEP_S)
    for guilty in (GUILTY, OTHER):
        await lose_ranks(harness, guilty, INNOCENT)
    await generate(harness, INNOCENT)
    for prompt in (GUILTY, OTHER):
        await generate(harness, prompt)


async def test_who_was_there_twice_runs_alone(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=STEP_S)
    for _ in range(2):
        await lose_ranks(harness, GUILTY, INNOCENT)
    innocent, guilty, other = (harness.submit(prompt, max_new_tokens=20) for prompt in (INNOCENT, GUILTY, OTHER))
    seen: set[frozenset[int]] = set()

    def watch() -> bool:
        running = frozenset(request.prompt_token_ids[0] for request in harness.engine.scheduler.running)
        seen.add(running)
        return not (harness.engine.scheduler.waiting or running)

    await wait_until(watch)
    assert frozenset({6}) in seen
    assert not any(running >= {5, 6} for running in seen)
    for stream, prompt in ((innocent, INNOCENT), (guilty, GUILTY), (other, OTHER)):
        assert tokens_of(await collect(stream)) == expected_tokens(prompt, 20)
    assert not harness.engine.requests.suspects.entries, "all ended well"


async def test_a_loss_alone_convicts_who_was_there_twice(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=STEP_S)
    for _ in range(2):
        await lose_ranks(harness, GUILTY, INNOCENT)
    ranks = harness.ranks
    ranks.gate.clear()
    guilty, innocent = harness.submit(GUILTY), harness.submit(INNOCENT, max_new_tokens=20)
    await wait_until(lambda: ranks.is_running)
    assert [request.prompt_token_ids for request in harness.engine.scheduler.running] == [(5,)]
    ranks.die()
    assert tokens_of(await collect(innocent)) == expected_tokens(INNOCENT, 20)
    assert finished_of(await collect(guilty)).finish.error is not None
    with pytest.raises(PromptQuarantined, match="were lost 3 times"):
        harness.submit(GUILTY)


async def test_copies_that_wait_are_refused_too(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=1, step_s=STEP_S)
    await lose_ranks(harness, GUILTY)
    ranks = harness.ranks
    ranks.gate.clear()
    first, second, other = (harness.submit(prompt, max_new_tokens=9) for prompt in (GUILTY, GUILTY, OTHER))
    await wait_until(lambda: ranks.is_running)
    ranks.die(RankHung(0, "RunStep", 30.0, "is stopped"))
    assert isinstance(finished_of(await collect(first)).finish.error, RankHung)
    assert isinstance(finished_of(await collect(second)).finish.error, PromptQuarantined)
    assert tokens_of(await collect(other)) == expected_tokens(OTHER, 9)


async def test_ranks_that_are_lost_between_steps_accuse_no_one(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=STEP_S)
    await generate(harness, GUILTY)
    for _ in range(3):
        await harness.lose_ranks()
    assert not harness.engine.requests.suspects.entries
    await generate(harness, GUILTY)


async def test_other_weights_are_another_computation(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine(step_s=STEP_S)
    for _ in range(2):
        await lose_ranks(harness, GUILTY)
    await (await swap(harness, shards, InFlightPolicy.WAIT))
    assert tokens_of(await collect(harness.submit(GUILTY, max_new_tokens=3))) == expected_tokens(
        GUILTY, 3, bias=NEW_BIAS
    )


def test_another_adapter_is_another_computation() -> None:
    suspects = SuspectPrompts()
    for _ in range(2):
        suspects.note_loss([make_request("r", [5], adapter=Adapter("a", "old"))], 0.0)
    for adapter in (None, Adapter("a", "new")):
        suspects.admit(make_request("r", [5], adapter=adapter), 0.0)
    with pytest.raises(PromptQuarantined):
        suspects.admit(make_request("r", [5], adapter=Adapter("b", "old")), 0.0)


def test_suspicion_expires() -> None:
    suspects = SuspectPrompts()
    for _ in range(2):
        suspects.note_loss([make_request("r", [5])], 0.0)
    with pytest.raises(PromptQuarantined):
        suspects.admit(make_request("r", [5]), EXPIRY_S - 1)
    suspects.admit(make_request("r", [5]), EXPIRY_S)
    suspects.note_loss([make_request("r", [5])], EXPIRY_S)
    suspects.admit(make_request("r", [5]), EXPIRY_S)


def test_the_memory_of_suspects_is_bounded() -> None:
    suspects = SuspectPrompts()
    for token in range(MAX_SUSPECTS + 10):
        suspects.note_loss([make_request("r", [token])], 0.0)
    assert len(suspects.entries) == MAX_SUSPECTS
    assert all(len(digest) == 32 for digest in suspects.entries)
    prompt = make_request("r", [5])
    assert SuspectPrompts()._digest(prompt) != suspects._digest(prompt), "digests are keyed"
