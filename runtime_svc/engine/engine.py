"""The engine's loop: schedule, run, update, launch the next step, publish the previous one's output.

    submit ─▶ queue ─▶ schedule ─▶ step ─▶ ranks ─▶ update ─▶ publish ─▶ stream
                          ▲                           │
                          └────── next step ◀─────────┘

Detokenizing and writing events of step N happen while step N+1 runs in the ranks. Async scheduling calls step N+2
meanwhile, so that the ranks need not wait for the engine; tokens are the same without. Operations that need the ranks
to themselves run between two steps of which the second has not been called.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from bundle.errors import KilnError, ResourcesShort
from bundle.manifest import ADAPTER_WEIGHTS, Manifest
from edge.supervision import report_failure
from execution.errors import ExecutionError, RankHung, WeightsInvalid
from execution.step import StepResult
from runtime_svc.engine.adapters import AdapterWrite, LoadedAdapter
from runtime_svc.engine.assembly import make_scheduler
from runtime_svc.engine.capture import CaptureLog
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.operations import InFlightPolicy, OperationQueue, ResetReceipt, hurrying
from runtime_svc.engine.output_text import OutputText
from runtime_svc.engine.ranks import RankLauncher, Ranks, relaunch
from runtime_svc.engine.request import Adapter, Finish, FinishReason, Request
from runtime_svc.engine.requests import RequestTable
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import StepBuilder, StepPlan
from runtime_svc.engine.streams import MergedStream, OutputStream, StepOutcome, StepOutput
from runtime_svc.engine.weights import EngineWeights
from runtime_svc.errors import DeploymentNotReady, EngineFailed, RequestsInFlight

_log = structlog.get_logger("engine")


class EngineState(enum.Enum):
    """Whether requests can run."""

    READY = enum.auto()
    RECOVERING = enum.auto()
    FAILED = enum.auto()


class _RunningStep(NamedTuple):
    plan: StepPlan
    result: asyncio.Future[StepResult]
    left: Sequence[int]


class Engine:
    """Serves one deployment; construct with `start`."""

    def __init__(
        self,
        deployment_id: str,
        manifest: Manifest,
        config: EngineConfig,
        launcher: RankLauncher,
        ranks: Ranks,
        *,
        weight_epoch: int,
    ) -> None:
        self._deployment_id = deployment_id
        #: Those that run, or restart; if a caller ends them, running requests end with its verdict, and they restart.
        self.ranks = ranks
        self._builder = StepBuilder(manifest)
        self._captures = CaptureLog(manifest)
        self._work = asyncio.Event()
        buckets = BucketTable.from_manifest(manifest)
        self.scheduler = make_scheduler(manifest, buckets, config.chunks)
        self.scheduler.weight_epoch = weight_epoch
        picks_late = all(one.leaves_logits for one in manifest.executables)
        self.requests = RequestTable(self.scheduler, config, wake=self._work.set, picks_late=picks_late)
        # Tokens that the host picks are on one rank only, so no step can take them from the ranks.
        self._is_async = config.async_scheduling and manifest.sampling.mode == "on_device"
        # The step whose result the loop waits for, and the one that has been called behind it.
        self._running: _RunningStep | None = None
        self._behind: _RunningStep | None = None
        self._operations = OperationQueue(self.scheduler, self.requests, wake=self._work.set)
        #: Those in use, and old ones beside them.
        self.weights = EngineWeights(
            launcher,
            lambda: self.ranks,
            self.scheduler,
            self.requests,
            self._operations,
            on_changed=self._note_weights,
        )
        self.state = EngineState.READY
        #: The engine calls it after its state has changed, or its first weights have come.
        self.on_state_changed: Callable[[], None] = lambda: None
        #: Why the engine failed.
        self.failure: KilnError | None = None
        #: What the host lacks for the ranks that restart; None while they need not wait for it.
        self.shortage: ResourcesShort | None = None
        self.num_steps = 0
        self._watch_ranks()
        self._task = asyncio.create_task(self._run(), name=f"engine {deployment_id}")
        self._task.add_done_callback(self._on_stopped)

    @classmethod
    async def start(
        cls,
        deployment_id: str,
        manifest: Manifest,
        config: EngineConfig,
        launcher: RankLauncher,
        *,
        weight_epoch: int = 1,
    ) -> Engine:
        """Launches the ranks and then the loop; `weight_epoch` is 0 if the launcher has no weights."""
        assert launcher.has_weights == (weight_epoch > 0), "epochs count weights"
        return cls(deployment_id, manifest, config, launcher, await launcher.launch(), weight_epoch=weight_epoch)

    @property
    def weight_epoch(self) -> int:
        """One more with each swap; 0 while the first weights are awaited."""
        return self.scheduler.weight_epoch

    def submit(
        self, requests: Sequence[Request], texts: Sequence[OutputText], *, deadline_s: float | None = None
    ) -> OutputStream | MergedStream:
        """Queues the sequences of a call; see `RequestTable.submit`."""
        assert self.state is not EngineState.FAILED, "the engine runs no request any more"
        assert self.weight_epoch, "there are no weights to run it with"
        return self.requests.submit(requests, texts, deadline_s=deadline_s)

    def check_policy(self, policy: InFlightPolicy) -> None:
        """Refuses an operation early if its policy would refuse it later."""
        running = self.scheduler.running
        if policy is InFlightPolicy.REFUSE and running:
            raise RequestsInFlight(len(running))

    async def reset_kv_cache(self, policy: InFlightPolicy) -> ResetReceipt:
        """Zeroes every slot between two steps."""
        return await self._reset(policy)

    async def reset_prefix_cache(self) -> ResetReceipt:
        """Forgets what later requests could share or continue of earlier ones; see `_reset`."""
        return await self._reset(InFlightPolicy.CONTINUE, self.scheduler.kv.reset)

    async def reset_session(self, owner: str, session_id: str) -> ResetReceipt:
        """Forgets a session, and what the KV cache keeps for it; see `_reset`."""
        sessions = self.requests.sessions
        sessions.check_idle(owner, session_id)
        return await self._reset(InFlightPolicy.CONTINUE, lambda: sessions.erase(owner, session_id))

    async def check_adapter(self, paths_by_rank: Mapping[int, Path]) -> None:
        """Has each rank check the file of an adapter that it could write, while steps run.

        Raises:
            WeightsInvalid: A file does not fit.
            RankLost: The ranks are down.
        """
        await self.ranks.check(ADAPTER_WEIGHTS, paths_by_rank)

    def load_adapter(self, key: str, adapter: Adapter, paths_by_rank: Mapping[int, Path]) -> None:
        """Makes a key mean an adapter; see `AdapterSlots.load`. Only with slots; its files stay while it is loaded."""
        self.scheduler.adapters.load(key, adapter, paths_by_rank)

    def unload_adapter(self, key: str) -> None:
        """Takes the meaning from a key; see `AdapterSlots.unload`."""
        self.scheduler.adapters.unload(key)

    def find_adapter(self, key: str) -> Adapter | None:
        """Returns what a key means for new requests; None if nothing."""
        return self.scheduler.adapters.find(key)

    def describe_adapter(self, key: str) -> LoadedAdapter | None:
        """Says where the adapter of a key is, and how many requests use it; None if the key means nothing."""
        return self.scheduler.adapters.describe(key)

    async def close(self) -> None:
        """Stops the loop and ends the ranks. The caller has ended the requests."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._operations.fail_all(DeploymentNotReady(self._deployment_id, "UNLOADING"))
        await self.ranks.close()
        self.weights.forget_old()

    async def _run(self) -> None:
        while True:
            try:
                await self._advance()
            except ExecutionError as error:
                # A step that failed may have left half a write in the KV cache: the ranks start anew then too.
                await self._recover(error)

    async def _advance(self) -> None:
        if self.ranks.died.done():
            raise self.ranks.died.result()
        called, self._behind = self._behind, None
        self._running = running = called or await self._begin_next()
        # The ranks compute meanwhile, if there is anything to compute.
        self.requests.publish()
        if running is None:
            self.scheduler.check_integrity()
            await self._work.wait()
            self._work.clear()
            return
        # A capture holds all inputs of a step, the tokens included.
        is_undisturbed = not self._operations.waiting and (self.weights.old is None or not self.weights.is_release_due)
        if self._is_async and is_undisturbed and not self.requests.num_captures:
            plan = self.scheduler.schedule_behind(running.plan)
            if plan is not None:
                self._behind = await self._begin(plan)
        result = await (self._pick_left(running) if running.left else running.result)
        self._running = None
        self.num_steps += 1
        self.scheduler.policy.chunk_size.observe(running.plan, result.duration_s)
        if result.invalid_rows:
            self.requests.end_invalid(running.plan, result.invalid_rows)
        self.requests.take_reported(running.plan, result.reported)
        outcome = StepOutcome.from_result(result)
        if self.requests.decode_step is not None:
            given = [(row.request, outcome.tokens[row.row]) for row in running.plan.rows if row.samples]
            await self.requests.decode(given)
        rows = self.scheduler.update(running.plan, outcome.tokens, self._now())
        if self.requests.constraints.running:
            self.requests.constraints.note_tokens(rows)
        self.requests.add_output(StepOutput(rows, outcome))

    async def _begin_next(self) -> _RunningStep | None:
        """Runs the operations that are due, then calls the next step; None if no request can run."""
        if self._operations.waiting:
            await self._operations.run_due()
        if self.weights.half_swapped is not None:
            error, self.weights.half_swapped = self.weights.half_swapped, None
            raise error
        if self.weights.old is not None and self.weights.is_release_due:
            await self.weights.release_old()
        if tainted := self.requests.take_tainted_blocks():
            await self.ranks.zero_state(tainted)
        if self.requests.constraints.running:
            await self.requests.constraints.wait()
            await self.requests.jump()
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        for row in plan.rows:
            if row.request.timeline.started_s is None:
                row.request.timeline.started_s = self._now()
        for write in self.scheduler.adapters.take_writes():
            await self._write_adapter(write)
        return await self._begin(plan)

    async def _write_adapter(self, write: AdapterWrite) -> None:
        """Writes an adapter into its slot. If its files no longer fit, its requests end, and rows of the plan idle."""
        try:
            await self.ranks.write(ADAPTER_WEIGHTS, write.slot, write.paths_by_rank)
        except (WeightsInvalid, ResourcesShort) as error:
            self.requests.end_adapter(write.digest, str(error))
            self.scheduler.adapters.note_failure(write)
        else:
            self.scheduler.statistics.adapter_writes += 1

    async def _begin(self, plan: StepPlan) -> _RunningStep:
        step = self._builder.build(plan, with_old=self.scheduler.uses_old(plan.rows[0].request))
        if self.requests.num_captures:
            self._captures.record(step, plan.list_captured())
        return _RunningStep(plan, await self.ranks.begin(step), step.left)

    async def _pick_left(self, step: _RunningStep) -> StepResult:
        """Has the ranks pick tokens that a step leaves, of rows whose masks come in time; returns the step's result."""
        left = [row for row in step.plan.rows if row.row in step.left and row.request.finish is None]
        await self.requests.constraints.wait_behind([row.request for row in left], step.result)
        found = [row for row in left if not row.request.lacks_mask and row.request.finish is None]
        # If the masks have come, this is called while the step runs, so that the ranks go on at once.
        picked = await self.ranks.pick(self._builder.describe(found)) if found else None
        result = await step.result
        return result if picked is None else await picked

    async def _reset(self, policy: InFlightPolicy, forget: Callable[[], Sequence[int]] | None = None) -> ResetReceipt:
        """Zeroes the KV cache between two steps: what `forget` returns, which frees it, or else all."""
        start_s = self._now()
        zeroed_bytes = 0
        blocks: Sequence[int] = ()

        async def reset() -> None:
            nonlocal zeroed_bytes, blocks
            if forget is None:
                zeroed_bytes = await self.ranks.zero_state(None)
                blocks = self.scheduler.kv.reset()
            elif blocks := forget():
                zeroed_bytes = await self.ranks.zero_state(blocks)

        with hurrying(self.ranks, policy):
            receipt = await self._operations.run("ResetKVCache", policy, reset)
        return ResetReceipt(
            receipt.aborted_requests, len(blocks), zeroed_bytes, self.weight_epoch, self._now() - start_s
        )

    async def _recover(self, error: ExecutionError) -> None:
        """Ends running requests and restarts the ranks; waiting requests wait on, a shortage of the host included."""
        self._change_state(EngineState.RECOVERING)
        steps = [step for step in (self._running, self._behind) if step is not None]
        self._running = self._behind = None
        self.requests.note_loss({row.request for step in steps for row in step.plan.rows})
        _log.error("ranks are down", deployment_id=self._deployment_id, error=str(error))
        self.scheduler.statistics.rank_hangs += isinstance(error, RankHung)
        for request in self.scheduler.running:
            self.requests.end(request, Finish(FinishReason.ERROR, error=error))
        await self.ranks.close()
        self.weights.forget_old()
        self.ranks = await relaunch(self.weights.launcher, self._deployment_id, self._note_shortage)
        self.shortage = None
        self.scheduler.kv.reset()
        self.scheduler.adapters.reset()
        self._watch_ranks()
        self.scheduler.statistics.rank_restarts += 1
        self._change_state(EngineState.READY)
        _log.info("ranks restarted", deployment_id=self._deployment_id)

    def _note_weights(self) -> None:
        self._work.set()
        self.on_state_changed()

    def _note_shortage(self, shortage: ResourcesShort) -> None:
        self.shortage = shortage

    def _change_state(self, state: EngineState) -> None:
        self.state = state
        self.on_state_changed()

    def _watch_ranks(self) -> None:
        self.ranks.died.add_done_callback(lambda _: self._work.set())

    def _on_stopped(self, task: asyncio.Task[None]) -> None:
        """Ends everything if the loop ended otherwise than by `close`."""
        if task.cancelled():
            return
        error = task.exception()
        _log.error("engine failed", deployment_id=self._deployment_id, exc_info=error)
        report_failure(task)
        self.failure = error if isinstance(error, KilnError) else EngineFailed(self._deployment_id)
        self._change_state(EngineState.FAILED)
        self._operations.fail_all(self.failure)
        self.requests.end_all(lambda _: Finish(FinishReason.ERROR, error=self.failure))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
