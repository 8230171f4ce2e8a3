"""The weights that an engine computes with: those in use, and old ones that ranks keep mapped beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bundle.errors import KilnError
from execution.errors import ExecutionError, RankLost, WeightsNotStaged
from runtime_svc.engine.operations import InFlightPolicy, OperationQueue, WeightsReceipt, hurrying
from runtime_svc.engine.ranks import RankLauncher, Ranks
from runtime_svc.engine.requests import RequestTable
from runtime_svc.engine.scheduler.scheduler import Scheduler
from runtime_svc.errors import OldWeightsInUse


@dataclass(frozen=True, slots=True)
class WeightSwap:
    """A swap of weights, which happens between two steps.

    Attributes:
        launcher: Launches ranks with the new weights, from the swap on.
        shard_paths_by_rank: The staged files; the engine stages them again if the ranks were restarted since. None puts
            the old weights back in use.
        policy: What becomes of running requests.
        keep_kv: Leave running requests what the KV cache holds of them. Later ones find nothing that the old weights
            computed.
        keep_old: Keep the old weights mapped when no request computes with them, for a way back.
        on_swapped: Called between the same two steps, also if the caller was cancelled meanwhile.
        on_released: Called when the old weights are no longer mapped, unless they are put back.
    """

    launcher: RankLauncher
    shard_paths_by_rank: Mapping[int, Path] | None
    policy: InFlightPolicy
    keep_kv: bool = False
    keep_old: bool = False
    on_swapped: Callable[[], None] = lambda: None
    on_released: Callable[[], None] = lambda: None


@dataclass(slots=True)
class OldWeights:
    """Weights that ranks keep mapped beside those in use, with what launches ranks with them.

    They go when no request computes with them any more, unless `is_kept`; `on_released` is called then.
    """

    launcher: RankLauncher
    weight_epoch: int
    is_kept: bool
    on_released: Callable[[], None]


class EngineWeights:
    """Stages, swaps and releases the weights of one engine."""

    def __init__(
        self,
        launcher: RankLauncher,
        find_ranks: Callable[[], Ranks],
        scheduler: Scheduler,
        requests: RequestTable,
        operations: OperationQueue,
        *,
        on_changed: Callable[[], None],
    ) -> None:
        """Begins with the weights of a launcher. `find_ranks` returns the ranks that run; others take their place.

        Calls `on_changed` after a swap, and when old weights may have to go.
        """
        #: Where ranks and the weights in use come from.
        self.launcher = launcher
        #: Weights that stay mapped beside those in use; None if there are none.
        self.old: OldWeights | None = None
        #: Set if a swap may have reached some ranks only.
        self.half_swapped: ExecutionError | None = None
        self._find_ranks = find_ranks
        self._scheduler = scheduler
        self._requests = requests
        self._operations = operations
        self._on_changed = on_changed

    @property
    def launchers(self) -> list[RankLauncher]:
        """Launchers of all weights that ranks map."""
        return [self.launcher] if self.old is None else [self.launcher, self.old.launcher]

    @property
    def is_release_due(self) -> bool:
        """Whether old weights are mapped in vain."""
        return self.old is not None and not self.old.is_kept and not self._scheduler.num_old

    async def stage(self, shard_paths_by_rank: Mapping[int, Path], policy: InFlightPolicy) -> None:
        """Maps new weights beside the ones in use, while steps run. There are no old ones.

        With ABORT as the policy of the swap that will follow, this waits less for a step that hangs.
        """
        assert self.old is None, "ranks map two sets of weights at most"
        try:
            with hurrying(self._find_ranks(), policy):
                await self._find_ranks().stage_weights(shard_paths_by_rank)
        except (KilnError, asyncio.CancelledError):
            await self._discard()
            raise

    async def swap(self, swap: WeightSwap) -> WeightsReceipt:
        """Makes staged weights, or the old ones, the ones in use, and raises the weight epoch.

        Raises:
            WeightsNotStaged: The ranks that mapped the old weights have ended.
        """
        ranks, previous_epoch = self._find_ranks(), self._scheduler.weight_epoch
        returning = self.old if swap.shard_paths_by_rank is None else None
        was_kept = returning is not None and returning.is_kept
        has_begun, has_ended = asyncio.Event(), asyncio.Event()

        async def exchange() -> None:
            has_begun.set()
            try:
                await self._exchange(swap, ranks)
            finally:
                has_ended.set()

        if returning is not None:
            # Its last request may end while the swap waits.
            returning.is_kept = True
        try:
            with hurrying(ranks, swap.policy):
                receipt = await self._operations.run("LoadWeights", swap.policy, exchange)
        except (KilnError, asyncio.CancelledError):
            if has_begun.is_set():
                # A caller that leaves now learns that it is over, and not how.
                await has_ended.wait()
            elif returning is None:
                await self._discard()
            else:
                returning.is_kept = was_kept
                self._on_changed()
            raise
        self._scheduler.statistics.swap_pause_s.observe(receipt.pause_s)
        epoch = self._scheduler.weight_epoch
        return WeightsReceipt(previous_epoch, epoch, receipt.aborted_requests, receipt.pause_s)

    async def give_up_old(self) -> None:
        """Releases old weights, if there are any, so that others can be staged.

        Raises:
            OldWeightsInUse: Requests compute with them.
        """
        if self.old is not None:
            if self._scheduler.num_old:
                raise OldWeightsInUse(self._scheduler.num_old, self.old.weight_epoch)
            await self.release_old()

    async def release_old(self) -> None:
        """Unmaps old weights, with which no request computes."""
        try:
            if self.old is not None:
                await self._discard()
        finally:
            self.forget_old()

    def forget_old(self) -> None:
        """Takes in that old weights, if there were any, are no longer mapped."""
        old, self.old = self.old, None
        if old is not None:
            old.on_released()

    async def _exchange(self, swap: WeightSwap, staged_in: Ranks) -> None:
        ranks, scheduler, epoch = self._find_ranks(), self._scheduler, self._scheduler.weight_epoch
        if ranks is not staged_in:
            if swap.shard_paths_by_rank is None:
                raise WeightsNotStaged
            await ranks.stage_weights(swap.shard_paths_by_rank)
        keeps_running = swap.policy is InFlightPolicy.FINISH_ON_OLD and scheduler.num_running > 0
        keeps_old = epoch > 0 and (keeps_running or swap.keep_old)
        try:
            await ranks.swap_weights(keeps_old=keeps_old)
            if not epoch:
                await swap.launcher.warm_up(ranks)
            if not (swap.keep_kv or keeps_running):
                await ranks.zero_state(None)
            scheduler.kv.reset()
        except ExecutionError as error:
            self.half_swapped = error
            raise
        old = OldWeights(self.launcher, epoch, swap.keep_old, swap.on_released) if keeps_old else None
        self.launcher, self.old = swap.launcher, old
        scheduler.begin_epoch(keeps_running=keeps_running)
        # Other weights compute other numbers.
        self._requests.suspects.entries.clear()
        swap.on_swapped()
        if old is None:
            swap.on_released()
        self._on_changed()

    async def _discard(self) -> None:
        """Unmaps weights that will not be used."""
        with suppress(RankLost):
            await self._find_ranks().discard_staged()
