"""Schedulers to test: with the parts that serve, and with fakes that hold what the others do not vary.

The fakes are a KV cache in blocks that sequences grow into, and a policy that computes prompts in parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bundle.manifest import Manifest
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.request import Request, SamplingParams, StopConditions, Timeline
from runtime_svc.engine.scheduler.async_scheduling import AsyncScheduling, RunningStep
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import RowTokens, ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.policy import Reserve, WholePrompts
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.bundles.manifests import make_executable
from tests.ranks.fakes import make_manifest


def make_request(name: str, num_prompt_tokens: int, *, max_new_tokens: int = 100, stop: Sequence[int] = ()) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(10, 10 + num_prompt_tokens)),
        sampling=SamplingParams(0.0, 0, 1.0, 0),
        stop=StopConditions(max_new_tokens, (), frozenset(stop)),
        timeline=Timeline(arrived_s=0.0),
    )


def make_scheduler(*, num_slots: int = 2, ctx_batch_size: int = 1, manifest: Manifest | None = None) -> Scheduler:
    """A scheduler with the parts that an engine gives it."""
    manifest = manifest or make_manifest(num_slots=num_slots, ctx_batch_size=ctx_batch_size)
    policy = WholePrompts(BucketTable.from_manifest(manifest), ctx_batch_size=manifest.limits.ctx_batch_size)
    kv = SlotManager(manifest.state.num_slots, manifest.limits.max_length)
    return Scheduler(policy, kv, max_running=manifest.state.num_slots)


def make_async(scheduler: Scheduler) -> AsyncScheduling:
    """Plans the steps behind those of a scheduler; calls nothing."""
    policy = scheduler._policy
    assert isinstance(policy, WholePrompts)

    async def begin(_: StepPlan) -> RunningStep:
        raise NotImplementedError

    return AsyncScheduling(scheduler, policy._buckets, begin, is_on=True)


def make_parts_scheduler(
    kv: SlotManager | BlockManager, *, max_running: int, max_tokens: int, max_new_tokens: int = 1
) -> Scheduler:
    """A scheduler whose policy computes prompts in parts."""
    policy = PromptParts(num_rows=2, max_tokens=max_tokens, max_new_tokens=max_new_tokens)
    return Scheduler(policy, kv, max_running=max_running)


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


class BlockManager:
    """A KV cache in blocks of a few positions; sequences hold as many as they need, in any order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_size
        self._free = list(range(num_blocks))
        self._held: dict[Request, tuple[int, ...]] = {}

    def reserve(self, request: Request, num_tokens: int) -> Placement | None:
        held = self._held.get(request, ())
        num_missing = -(-(request.num_computed_tokens + num_tokens) // self.block_tokens) - len(held)
        if num_missing > len(self._free):
            return None
        if num_missing > 0:
            held = self._held[request] = held + tuple(self._free.pop() for _ in range(num_missing))
        return Placement(held)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def release(self, request: Request) -> int:
        blocks = self._held.pop(request, ())
        self._free += blocks
        return len(blocks)

    def reset(self) -> None:
        pass

    def check_integrity(self, requests: Collection[Request]) -> None:
        for request in self._held:
            assert request in requests, f"{request.request_id} holds blocks and does not run"
        for request in requests:
            room = len(self._held.get(request, ())) * self.block_tokens
            assert request.num_computed_tokens <= room, f"{request.request_id} lost blocks"
        blocks = sorted([*self._free, *(block for held in self._held.values() for block in held)])
        assert blocks == list(range(self.num_blocks))


class PromptParts:
    """Computes at most `max_tokens` of the tokens that each sequence lacks, in a step: oldest sequences first.

    A row that samples gives up to `max_new_tokens`.
    """

    def __init__(self, *, num_rows: int, max_tokens: int, max_new_tokens: int) -> None:
        self._executable = make_executable("context_encoding", max_tokens, num_rows)
        self._max_tokens = max_tokens
        self._max_new_tokens = max_new_tokens

    def plan(self, running: Collection[Request], waiting: Collection[Request], reserve: Reserve) -> StepPlan | None:
        rows: list[ScheduledRow] = []
        for request in [*running, *waiting]:
            lacks = request.num_tokens - request.num_computed_tokens
            num_tokens = min(lacks, self._max_tokens)
            if request.is_paused or len(rows) == self._executable.batch_size:
                continue
            start, samples = request.num_computed_tokens, num_tokens == lacks
            placement = reserve(request, num_tokens + samples * (self._max_new_tokens - 1))
            if placement is not None:
                rows.append(ScheduledRow(len(rows), request, start, num_tokens, placement, samples))
        return StepPlan(self._executable, tuple(rows)) if rows else None
