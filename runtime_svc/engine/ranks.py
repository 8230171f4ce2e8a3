"""The protocol of rank groups, which `execution.ranks.group.RankGroup` implements, and how one replaces another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

import structlog

from bundle.errors import KilnError, ResourcesShort
from bundle.host.shortage import lasting_delays, naming_shortages
from execution.errors import RankLost
from execution.step import ProcessedRow, Step, StepResult

#: Seconds before each launch; if the last one fails, the engine fails.
RESTART_DELAYS_S: Final = (0.0, 0.5, 2.0, 8.0)

_log = structlog.get_logger("engine")


class Ranks(Protocol):
    """The rank processes of one deployment, loaded. Every call raises `RankLost` once a rank has exited."""

    @property
    def died(self) -> asyncio.Future[RankLost]:
        """Done when a rank has exited unasked."""

    @property
    def weights_bytes(self) -> int:
        """Memory mapped for weights, over all ranks."""

    @property
    def state_bytes(self) -> int:
        """Memory of the KV cache, over all ranks."""

    async def warm_up(self) -> None:
        """Touches the whole KV cache, and runs every executable once."""

    async def begin(self, step: Step) -> asyncio.Future[StepResult]:
        """Calls every rank to run one executable once; returns the result to come.

        The previous step must have ended, unless this one depends on it.
        """

    async def pick(self, processed: Sequence[ProcessedRow]) -> asyncio.Future[StepResult]:
        """Has tokens picked of rows that the newest step, which may still run, leaves; returns its result with them, to
        come.
        """

    async def stage_weights(self, shard_paths_by_rank: Mapping[int, Path]) -> None:
        """Maps new weights beside the ones in use; steps may run meanwhile."""

    async def swap_weights(self, *, keeps_old: bool = False) -> float:
        """Makes the staged weights the ones in use; returns the seconds it took. No step may run meanwhile.

        With `keeps_old`, the old ones take the place of the staged ones: steps can run with them.
        """

    async def discard_staged(self) -> None:
        """Unmaps weights that are not in use, if there are any."""

    async def check(self, weight_set: str, paths_by_rank: Mapping[int, Path]) -> None:
        """Checks that files are entries of a mutable weight set; steps may run meanwhile."""

    async def write(self, weight_set: str, index: int, paths_by_rank: Mapping[int, Path]) -> None:
        """Writes an entry of a mutable weight set on all ranks, or on none if a file does not fit; no step may run."""

    async def zero_state(self, slots: Sequence[int] | None) -> int:
        """Sets KV slots, None for all, to zero; returns the bytes written. No step may run meanwhile."""

    def hurry(self) -> AbstractContextManager[None]:
        """Gives steps a tenth of their time until the block ends: then the ranks count as hung."""

    def end(self, verdict: RankLost) -> None:
        """Kills the processes: calls raise `verdict`, and `died` has it."""

    async def close(self) -> None:
        """Ends the processes."""


class RankLauncher(Protocol):
    """Starts rank groups for the executables of one bundle and the weights in use, as often as ranks die."""

    @property
    def has_weights(self) -> bool:
        """Whether ranks start with weights; those without wait for a swap."""

    async def launch(self) -> Ranks:
        """Starts the processes, maps weights, loads every executable, warms up."""

    async def warm_up(self, ranks: Ranks) -> None:
        """Warms ranks up that have just got their first weights."""


async def relaunch(launcher: RankLauncher, deployment_id: str, on_shortage: Callable[[ResourcesShort], None]) -> Ranks:
    """Launches ranks, a few times if that fails, and as often as it takes while the host is short of something."""
    delays_s, shortage_delays_s = iter(RESTART_DELAYS_S), lasting_delays()
    delay_s: float | None = next(delays_s)
    while True:
        await asyncio.sleep(delay_s or 0.0)
        try:
            with naming_shortages():
                return await launcher.launch()
        except ResourcesShort as shortage:
            _log.warning("restart is delayed", deployment_id=deployment_id, error=str(shortage))
            on_shortage(shortage)
            delay_s = next(shortage_delays_s)
        except KilnError as failure:
            _log.warning("restart failed", deployment_id=deployment_id, error=str(failure))
            delay_s = next(delays_s, None)
            if delay_s is None:
                raise
