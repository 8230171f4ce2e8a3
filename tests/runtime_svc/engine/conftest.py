"""An engine on fake ranks, and how to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from runtime_svc.engine.engine import Engine, EngineConfig
from runtime_svc.engine.events import Event, Finished, TokenDelta
from runtime_svc.engine.request import Finish, FinishReason, Request, SamplingParams, StopConditions, Timeline
from runtime_svc.engine.streams import OutputStream
from runtime_svc.text.output import SequenceText
from tests.runtime_svc.fakes import FakeLauncher, make_manifest


class LetterTokenizer:
    """Token i is a letter, so that the text of every token is known."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.token_text(token_id) for token_id in token_ids)

    def decode_one(self, token_id: int) -> str:
        return self.token_text(token_id)

    def token_text(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)


def letters(token_ids: list[int]) -> str:
    return LetterTokenizer().decode(token_ids)


class EngineHarness:
    """One engine and its launcher."""

    def __init__(self, engine: Engine, launcher: FakeLauncher) -> None:
        self.engine = engine
        self.launcher = launcher
        self._count = 0

    @property
    def ranks(self) -> Any:
        return self.launcher.ranks

    def submit(
        self,
        prompt: list[int],
        *,
        request_id: str = "",
        max_new_tokens: int = 40,
        temperature: float = 0.0,
        seed: int = 0,
        stop_strings: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
        top_logprobs: int | None = None,
        deadline_s: float | None = None,
    ) -> OutputStream:
        self._count += 1
        now_s = asyncio.get_running_loop().time()
        request = Request(
            request_id=request_id or f"request-{self._count}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature, 0, 1.0, seed),
            stop=StopConditions(max_new_tokens, stop_strings, frozenset(stop_token_ids)),
            timeline=Timeline(now_s),
            top_logprobs=top_logprobs,
        )
        text = SequenceText(LetterTokenizer(), stop_strings)  # type: ignore[arg-type]
        absolute_s = None if deadline_s is None else now_s + deadline_s
        return self.engine.submit(request, text, deadline_s=absolute_s)


StartEngine = Callable[..., Awaitable[EngineHarness]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts engines; keywords go to the config and the manifest."""
    engines: list[Engine] = []

    async def start(
        config: EngineConfig | None = None, *, step_s: float = 0.0, **manifest_options: Any
    ) -> EngineHarness:
        manifest = make_manifest(**manifest_options)
        launcher = FakeLauncher(manifest, step_s=step_s)
        engine = await Engine.start("test", manifest, config or EngineConfig(), launcher)
        engines.append(engine)
        return EngineHarness(engine, launcher)

    yield start
    for engine in engines:
        engine.scheduler.check_integrity()
        engine.requests.end_all(lambda _: Finish(FinishReason.ABORTED))
        await engine.close()


async def collect(stream: OutputStream) -> list[Event]:
    """Every event of a stream; checks what holds of every stream."""
    events = await collect_rest(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [isinstance(event.payload, Finished) for event in events] == [False] * (len(events) - 1) + [True]
    return events


async def collect_rest(stream: OutputStream) -> list[Event]:
    """What is left of a stream that was begun."""
    return [event async for event in stream]


def tokens_of(events: list[Event]) -> list[int]:
    deltas = [event.payload for event in events if isinstance(event.payload, TokenDelta)]
    return [token.token_id for delta in deltas for token in delta.tokens]


def text_of(events: list[Event]) -> str:
    return "".join(event.payload.text for event in events if isinstance(event.payload, TokenDelta))


def finished_of(events: list[Event]) -> Finished:
    payload = events[-1].payload
    assert isinstance(payload, Finished)
    return payload


async def hold_with_follower(harness: EngineHarness) -> None:
    """Stops ranks that take some time for a step in one behind which another has been called; the caller opens the
    gate."""
    await wait_until(lambda: harness.ranks.num_under_way == 2)
    harness.ranks.gate.clear()
    await asyncio.sleep(4 * harness.ranks.step_s)
    assert harness.ranks.num_under_way == 2


async def wait_until(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
