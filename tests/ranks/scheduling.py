"""Schedulers to test: with the parts that serve, and with a policy that gives several tokens a row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from bundle.abi.inputs import COMPUTED_CONTEXT, LIVE_ROWS
from bundle.manifest import Manifest, Serving
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.adapters import AdapterSlots
from runtime_svc.engine.assembly import make_scheduler as assemble
from runtime_svc.engine.config import ChunkLimits
from runtime_svc.engine.kv.manager import KvManager
from runtime_svc.engine.request import Adapter, Request, StopConditions, Timeline
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import RowTokens, ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.policy import AlternatingSteps
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.bundles.manifests import DYNAMIC_FLAGS, make_executable
from tests.ranks.fakes import make_manifest


def make_request(
    name: str, prompt: int | Sequence[int], *, max_new_tokens: int = 100, stop: Sequence[int] = (), **fields: Any
) -> Request:
    """A greedy request whose prompt has so many tokens, or these; other keywords are its fields."""
    tokens = range(10, 10 + prompt) if isinstance(prompt, int) else prompt
    own: dict[str, Any] = {"sampling": SamplingParams(0.0, 0, 1.0, 0), "timeline": Timeline(arrived_s=0.0)}
    return Request(name, tuple(tokens), stop=StopConditions(max_new_tokens, (), frozenset(stop)), **(own | fields))


def make_scheduler(
    *, manifest: Manifest | None = None, chunks: ChunkLimits | None = None, **manifest_options: Any
) -> Scheduler:
    """A scheduler with the parts that an engine gives it."""
    manifest = manifest or make_manifest(**{"num_slots": 2, **manifest_options})
    return assemble(manifest, BucketTable.from_manifest(manifest), chunks or ChunkLimits(8))


def make_block_scheduler(
    *,
    num_blocks: int,
    flags: Sequence[str] = (COMPUTED_CONTEXT, LIVE_ROWS),
    prefix_caching: bool = True,
    **options: Any,
) -> Scheduler:
    """The same on blocks of 4 tokens, for sequences of up to 64."""
    serving = Serving(prefix_caching=prefix_caching)
    own = {"flags": (*DYNAMIC_FLAGS, *flags), "num_blocks": num_blocks, "block_tokens": 4, "serving": serving}
    return make_scheduler(**(own | options))


def make_parts_scheduler(kv: KvManager, *, max_running: int, max_tokens: int, max_new_tokens: int = 1) -> Scheduler:
    """A scheduler whose policy computes prompts in parts, and whose steps may give several tokens."""
    policy = PromptParts(num_rows=2, max_tokens=max_tokens, max_new_tokens=max_new_tokens)
    return Scheduler(policy, kv, max_running=max_running)


def give_adapters(scheduler: Scheduler, num_slots: int, names: Iterable[str]) -> AdapterSlots:
    """Gives a scheduler slots for adapters, and loads some, whose digests and files are their names."""
    scheduler.adapters = slots = AdapterSlots(num_slots)
    for name in names:
        slots.load(name, Adapter(name, name), {0: Path(name)})
    return slots


def run_step(scheduler: Scheduler, *, tokens: Sequence[int] = (5,)) -> StepPlan | None:
    """One step whose every row gives `tokens`."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    if plan is not None:
        update(scheduler, plan, [tokens] * plan.executable.batch_size)
    return plan


def update(scheduler: Scheduler, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> list[RowTokens]:
    """Ends a step whose rows give `tokens`, and checks what it left."""
    outputs = scheduler.update(plan, tokens, now_s=1.0)
    scheduler.check_integrity()
    return outputs


def names(plan: StepPlan | None) -> list[str]:
    assert plan is not None
    return [row.request.request_id for row in plan.rows]


class PromptParts(AlternatingSteps):
    """Computes at most `max_tokens` of the tokens that each sequence lacks, in a step: oldest sequences first.

    A row that samples gives up to `max_new_tokens`.
    """

    def __init__(self, *, num_rows: int, max_tokens: int, max_new_tokens: int) -> None:
        super().__init__(BucketTable.from_manifest(make_manifest()), ChunkLimits())
        self._executable = make_executable("context_encoding", max_tokens, num_rows)
        self._max_tokens = max_tokens
        self._max_new_tokens = max_new_tokens

    def plan(
        self,
        running: Collection[Request],
        waiting: Collection[Request],
        kv: KvManager,
        *,
        has_company: bool = False,
    ) -> StepPlan | None:
        rows: list[ScheduledRow] = []
        for request in [*running, *waiting]:
            if request.is_paused or len(rows) == self._executable.batch_size:
                continue
            start = request.num_computed_tokens or kv.find_prefix(request)
            lacks = request.num_tokens - start
            num_tokens = min(lacks, self._max_tokens)
            samples = num_tokens == lacks
            num_reserved = num_tokens + samples * (self._max_new_tokens - 1)
            placement = kv.reserve(request, num_reserved, num_cached=start - request.num_computed_tokens)
            if placement is not None:
                rows.append(ScheduledRow(len(rows), request, start, num_tokens, placement, samples))
        return StepPlan(self._executable, tuple(rows)) if rows else None
