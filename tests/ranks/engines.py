"""An engine on fake ranks, and how to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from bundle.abi.inputs import COMPUTED_CONTEXT, LIVE_ROWS, PROCESSORS
from bundle.manifest import Serving
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.engine import Engine, EngineState
from runtime_svc.engine.events import Accepted, Event, Finished, GeneratedToken, TokenDelta
from runtime_svc.engine.operations import InFlightPolicy, WeightsReceipt
from runtime_svc.engine.prompt_reports import PromptReport
from runtime_svc.engine.request import (
    Adapter,
    Finish,
    FinishReason,
    Request,
    Session,
    StallPolicy,
    StopConditions,
    Timeline,
)
from runtime_svc.engine.streams import MergedStream, OutputStream
from runtime_svc.engine.weights import WeightSwap
from runtime_svc.text.codec import SequenceText
from runtime_svc.text.constraints import ConstrainedOutput
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.hang_guard import HANG_S
from tests.ranks.fakes import make_manifest
from tests.ranks.launchers import FakeLauncher

NEW_BIAS = 31
#: Of executables that read what the cache holds, and skip idle rows.
FLAGS = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT, LIVE_ROWS)
#: Blocks of 4 tokens, for sequences of up to 64; and such that requests share.
BLOCKS: dict[str, Any] = {"flags": FLAGS, "num_blocks": 64, "block_tokens": 4}
CACHING = BLOCKS | {"serving": Serving(prefix_caching=True)}


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

    async def hold(self) -> None:
        """Stops the ranks in the middle of the next step, after which the caller opens the gate."""
        self.ranks.gate.clear()
        await wait_until(lambda: self.ranks.is_running)

    def load_adapter(self, key: str, directory: Path, number: int) -> Adapter:
        """Makes a key mean an adapter that adds a number to the bias; equal numbers are equal adapters."""
        path = directory / f"adapter-{number}"
        path.write_text(str(number))
        adapter = Adapter(key, str(number))
        self.engine.load_adapter(key, adapter, {0: path})
        return adapter

    async def lose_ranks(self) -> None:
        """Ends the ranks; others take their place."""
        lost = self.ranks
        lost.die()
        await wait_until(lambda: self.ranks is not lost and self.engine.state is EngineState.READY)

    def count_computed(self) -> int:
        """Counts the tokens of prompts that steps have computed, of executables that skip idle rows."""
        prefills = [step.inputs for step in self.ranks.steps if step.tag.startswith("context")]
        return sum(int(sum(inputs["num_tokens"][: int(inputs["live_rows"][0])])) for inputs in prefills)

    def submit(self, prompt: list[int], **options: Any) -> OutputStream:
        """Queues a request; see `submit_call`."""
        stream = self.submit_call(prompt, 1, **options)
        assert isinstance(stream, OutputStream)
        return stream

    def submit_call(
        self,
        prompt: list[int],
        num_sequences: int,
        *,
        request_id: str = "",
        max_new_tokens: int = 40,
        temperature: float = 0.0,
        seed: int = 0,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        stop_strings: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
        top_logprobs: int | None = None,
        stall: StallPolicy | None = None,
        deadline_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapter | None = None,
        owner: str = "",
        session: str = "",
        constrained: ConstrainedOutput | None = None,
        caller: str = "caller",
        ttl_s: float = 60.0,
        report: PromptReport | None = None,
    ) -> OutputStream | MergedStream:
        self._count += 1
        now_s = asyncio.get_running_loop().time()
        request = Request(
            request_id=request_id or f"request-{self._count}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature, seed=seed, **sampling),
            stop=StopConditions(max_new_tokens, stop_strings, frozenset(stop_token_ids)),
            timeline=Timeline(now_s),
            top_logprobs=top_logprobs,
            stall=stall,
            cache_salt=cache_salt,
            adapter=adapter,
            constrained=constrained,
            owner=owner,
            session=Session(caller, session, ttl_s, now_s) if session else None,
            report=report,
        )
        requests = request.fan_out(num_sequences)
        texts = [SequenceText(LetterTokenizer(), stop_strings) for _ in requests]  # type: ignore[arg-type]
        absolute_s = None if deadline_s is None else now_s + deadline_s
        return self.engine.submit(requests, texts, deadline_s=absolute_s)


StartEngine = Callable[..., Awaitable[EngineHarness]]


@pytest.fixture(params=[True, False], ids=["async", "one_by_one"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether engines call a step while the previous one runs: streams, tokens and ends are the same."""
    return bool(request.param)


@pytest.fixture
async def start_engine(is_async: bool) -> AsyncIterator[StartEngine]:
    """Starts engines; keywords go to the manifest."""
    engines: list[Engine] = []

    async def start(
        config: EngineConfig | None = None,
        *,
        step_s: float = 0.0,
        make_launcher: Callable[..., FakeLauncher] = FakeLauncher,
        on_device: bool = False,
        **manifest_options: Any,
    ) -> EngineHarness:
        manifest = make_manifest(**manifest_options)
        if on_device:
            # Each executable a second time, with processors.
            flags = (PROCESSORS, "cuts", *manifest_options["flags"])
            processing = make_manifest(**manifest_options | {"flags": flags})
            executables = (*manifest.executables, *processing.executables)
            manifest = msgspec.structs.replace(manifest, executables=executables)
        launcher = make_launcher(manifest, step_s=step_s)
        engine = await Engine.start(
            "test", manifest, replace(config or EngineConfig(), async_scheduling=is_async), launcher
        )
        engines.append(engine)
        return EngineHarness(engine, launcher)

    yield start
    for engine in engines:
        engine.scheduler.check_integrity()
        engine.requests.end_all(lambda _: Finish(FinishReason.ABORTED))
        await engine.close()


@pytest.fixture
def shards(tmp_path: Path) -> dict[int, Path]:
    """Weights that change the tokens."""
    path = tmp_path / "shard"
    path.write_text(str(NEW_BIAS))
    return {0: path}


async def swap(
    harness: EngineHarness, shards: dict[int, Path], policy: InFlightPolicy, **options: Any
) -> asyncio.Task[WeightsReceipt]:
    """Stages weights and begins to swap them in; options are those of `WeightSwap`."""
    weights = harness.engine.weights
    await weights.stage(shards, policy)
    launcher = FakeLauncher(harness.launcher.manifest, bias=NEW_BIAS, weights_ref="fake:v2")
    task = asyncio.create_task(weights.swap(WeightSwap(launcher, shards, policy, **options)))
    await asyncio.sleep(0)
    return task


async def collect(stream: OutputStream) -> list[Event]:
    """Every event of a stream; checks what holds of every stream."""
    events = await collect_rest(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [isinstance(event.payload, Finished) for event in events] == [False] * (len(events) - 1) + [True]
    return events


async def collect_sequences(stream: OutputStream | MergedStream) -> list[list[Event]]:
    """Every event of a call's stream by sequence; checks what holds of every stream of several sequences."""
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [isinstance(event.payload, Accepted) for event in events] == [True] + [False] * (len(events) - 1)
    assert events[0].sequence_index == 0
    count = max(event.sequence_index for event in events) + 1
    sequences = [[event for event in events if event.sequence_index == index] for index in range(count)]
    for own in sequences:
        assert [isinstance(event.payload, Finished) for event in own] == [False] * (len(own) - 1) + [True]
    assert [end.finish for end in stream.ends] == [finished_of(own).finish for own in sequences]
    return sequences


async def collect_rest(stream: OutputStream) -> list[Event]:
    """What is left of a stream that was begun."""
    return [event async for event in stream]


def generated_of(events: list[Event]) -> list[GeneratedToken]:
    """Every token with all that the events say of it; a reader that is late gets several in one event."""
    return [token for event in events if isinstance(event.payload, TokenDelta) for token in event.payload.tokens]


def tokens_of(events: list[Event]) -> list[int]:
    return [token.token_id for token in generated_of(events)]


def epochs_of(events: list[Event]) -> list[int]:
    """The weight epoch of every token."""
    deltas = [(event.weight_epoch, event.payload) for event in events if isinstance(event.payload, TokenDelta)]
    return [epoch for epoch, delta in deltas for _ in delta.tokens]


def text_of(events: list[Event]) -> str:
    return "".join(event.payload.text for event in events if isinstance(event.payload, TokenDelta))


def finished_of(events: list[Event]) -> Finished:
    payload = events[-1].payload
    assert isinstance(payload, Finished)
    return payload


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
