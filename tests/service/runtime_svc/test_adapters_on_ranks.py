"""An engine on real rank processes that serves adapters, against transformers with each adapter merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bundle.manifest import Serving
from execution.errors import RankDied
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.engine import Engine
from runtime_svc.engine.events import Event
from runtime_svc.engine.request import Adapter, Finish, FinishReason
from tests.bundles.manifests import DYNAMIC
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.adapters import fit, make_adapter, with_room
from tests.checkpoints.tiny_models import GEOMETRIES, write_tiny_model
from tests.parity.reference import Reference, assert_same_tokens, draw_prompt
from tests.processes import is_rank, note_others, own_children
from tests.ranks.engines import EngineHarness, collect, collect_rest, finished_of, generated_of, tokens_of, wait_until

#: Ranks of LoRA by key; there are slots for two.
RANKS = {"a": 2, "b": 8, "c": 5}
DEGREE = 2
COUNT = 12


@dataclass(frozen=True)
class Adapted:
    """A model with room for adapters, and three of these."""

    bundle: UnpublishedBundle
    paths: dict[str, dict[int, Path]]
    digests: dict[str, str]
    #: The model with each adapter merged, and without one.
    references: dict[str, Reference]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    directory = tmp_path_factory.mktemp("adapted")
    tiny = write_tiny_model(directory / "model", next(iter(GEOMETRIES.values())))
    plain = tiny.spec().description
    description = with_room(plain)
    references, paths, digests = {"": Reference(directory, deepcopy(tiny.model))}, {}, {}
    for seed, (key, rank) in enumerate(RANKS.items()):
        merged = make_adapter(tiny, directory / key, seed=seed, r=rank).merge_and_unload()
        references[key] = Reference(directory, merged)
        fitted = fit(directory / key, description, tp_degree=DEGREE)
        paths[key] = {one: directory / f"{key}-{one}.safetensors" for one in range(DEGREE)}
        files = {one: path.open("wb") for one, path in paths[key].items()}
        fitted.write(files)
        for file in files.values():
            file.close()
        digests[key] = fitted.digest
    spec = tiny.spec(
        description=description,
        tp_degree=DEGREE,
        sampling=msgspec.structs.replace(DYNAMIC, global_topk=0),
        reads_context=True,
        skips_idle=True,
        num_blocks=32,
        block_tokens=8,
    )
    plan = tiny.plan(tp_degree=DEGREE, description=description)
    buckets = {"context_buckets": (16,), "token_buckets": (128,)}
    bundle = make_bundle(directory, spec, plan, tiny.checkpoint, **buckets)
    serving = Serving(prefix_caching=True)
    return Adapted(
        replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, serving=serving)), paths, digests, references
    )


class Launcher:
    """Launches groups of real ranks; see `RankLauncher`."""

    has_weights = True

    def __init__(self, bundle: UnpublishedBundle, forkservers: RankForkservers) -> None:
        self._bundle, self._forkservers = bundle, forkservers

    async def launch(self) -> RankGroup:
        group = await RankGroup.start(
            self._bundle.manifest, self._bundle.blobs, num_threads=1, open_forkserver=self._forkservers.open
        )
        await group.load()
        await group.warm_up()
        return group

    async def warm_up(self, ranks: RankGroup) -> None:
        await ranks.warm_up()


@asynccontextmanager
async def serve(adapted: Adapted, forkservers: RankForkservers, keys: str = "abc") -> AsyncIterator[EngineHarness]:
    """An engine into which adapters of some keys are loaded."""
    launcher: Any = Launcher(adapted.bundle, forkservers)
    engine = await Engine.start("test", adapted.bundle.manifest, EngineConfig(), launcher)
    try:
        for key in keys:
            await load(engine, adapted, key)
        yield EngineHarness(engine, launcher)
        engine.scheduler.check_integrity()
    finally:
        engine.requests.end_all(lambda _: Finish(FinishReason.ABORTED))
        await engine.close()


async def load(engine: Engine, adapted: Adapted, key: str, source: str = "") -> None:
    """Makes a key mean its adapter, or that of another."""
    source = source or key
    await engine.check_adapter(adapted.paths[source])
    engine.load_adapter(key, Adapter(key, adapted.digests[source]), adapted.paths[source])


async def generate(harness: EngineHarness, prompt: list[int], key: str, count: int = COUNT) -> list[Event]:
    adapter = harness.engine.find_adapter(key)
    return await collect(harness.submit(prompt, max_new_tokens=count, adapter=adapter, top_logprobs=0))


async def check(harness: EngineHarness, adapted: Adapted, prompt: list[int], key: str) -> int:
    """Checks the tokens of one request; returns how many of its prompt were cached."""
    events = await generate(harness, prompt, key)
    expected = adapted.references[key].greedy(prompt, COUNT)
    assert len(tokens_of(events)) == COUNT
    assert_same_tokens(tokens_of(events), expected)
    return finished_of(events).usage.cached_prompt_tokens


async def test_rows_of_one_batch_have_several_adapters_and_lost_ranks_get_theirs_again(
    adapted: Adapted, forkservers: RankForkservers
) -> None:
    note_others()
    shared = draw_prompt(16)
    expected = {key: tuple(one.greedy(shared, COUNT).tokens) for key, one in adapted.references.items()}
    assert len(set(expected.values())) == 4, "adapters change tokens"
    prompts = [draw_prompt(3 + number, seed=number) for number in range(9)]
    async with serve(adapted, forkservers) as harness:
        calls = zip(prompts, cycle(["a", "b", "", "c"]), strict=False)
        await asyncio.gather(*(check(harness, adapted, prompt, key) for prompt, key in calls))
        for cached in (0, 8):
            for key in adapted.references:
                assert await check(harness, adapted, shared, key) == cached, f"adapter {key!r} meets keys of its own"

        lost = [
            harness.submit(prompt, max_new_tokens=60, adapter=harness.engine.find_adapter(key))
            for prompt, key in zip(prompts, "ab", strict=False)
        ]
        await wait_until(lambda: harness.engine.scheduler.num_running == 2)
        await anext(aiter(lost[0]))
        next(one for one in own_children() if is_rank(one)).kill()
        await wait_until(lambda: harness.engine.scheduler.statistics.rank_restarts == 1)
        for stream in lost:
            assert isinstance(finished_of(await collect_rest(stream)).finish.error, RankDied)
        described = [harness.engine.describe_adapter(key) for key in "abc"]
        assert [one is None or one.slot for one in described] == [None] * 3
        calls = zip(prompts, cycle(["c", "a", "", "b"]), strict=False)
        await asyncio.gather(*(check(harness, adapted, prompt, key) for prompt, key in calls))


async def test_rows_without_an_adapter_are_the_same_whatever_is_loaded_beside_them(
    adapted: Adapted, forkservers: RankForkservers
) -> None:
    """vLLM's issue 42007: what an adapter had left in a slot was added to rows without one."""
    prompt = draw_prompt(9, seed=5)

    async def generate_base(harness: EngineHarness) -> list[tuple[int, float | None]]:
        return [(one.token_id, one.logprob) for one in generated_of(await generate(harness, prompt, "", 40))]

    async with serve(adapted, forkservers, keys="") as harness:
        before = await generate_base(harness)
        assert [token for token, _ in before] == adapted.references[""].greedy(prompt, 40).tokens
        running = asyncio.create_task(generate_base(harness))
        for key in "abcab":
            await load(harness.engine, adapted, key)
            await check(harness, adapted, prompt, key)
            harness.engine.unload_adapter(key)
        for tokens in (await running, await generate_base(harness)):
            assert [token for token, _ in tokens] == [token for token, _ in before]
            assert [one for _, one in tokens] == pytest.approx([one for _, one in before], abs=1e-5)
