"""Notices ranks that do not answer: stopped, waiting for a driver that never returns, or computing without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

from bundle.manifest import Manifest
from execution.errors import RankHung
from execution.ranks.control import Launch, Load, RunStep, StageWeights, WarmUp, name_format
from execution.ranks.handle import RankHandle
from execution.stall import LOOKS_PER_TIMEOUT, Stall, Watch, is_stopped
from targets.registry import find_format

#: Seconds that every step may take, if no option says otherwise.
MIN_STEP_TIMEOUT_S: Final = 30.0
#: A step may take as many times as long as the slowest step that has ended.
STEP_FACTOR: Final = 50
#: A step whose ranks compute may take as many times as long as one whose ranks stand still.
BUSY_FACTOR: Final = 10
#: A step that an operation wants to abort has so small a part of its time.
HURRY_DIVISOR: Final = 10

#: A rank that computes for a smaller share of the time stands still: threads that only look whether there is work.
_IDLE_SHARE: Final = 0.01
#: Calls that may compute for as long as it takes: they start, read whole files or run every executable.
_LONG_CALLS: Final = (Launch, Load, StageWeights, WarmUp)


class RankWatchdog:
    """Looks at the ranks of one group, with one timer.

    A look costs some microseconds for each rank, a step two comparisons.
    """

    def __init__(
        self,
        ranks: Sequence[RankHandle],
        min_step_timeout_s: float,
        on_hung: Callable[[RankHung], None],
        *,
        min_load_timeout_s: float = 0.0,
    ) -> None:
        """Begins to look, from the running event loop. `on_hung` ends the group if a call of a rank takes too long.

        Ranks may stand still for `min_load_timeout_s` while they load, if a step may take less.
        """
        self._slowest_step_s = 0.0
        self._ranks = ranks
        self._min_step_timeout_s = min_step_timeout_s
        self._min_load_timeout_s = min_load_timeout_s
        self._on_hung = on_hung
        self._num_hurrying = 0
        self._interval_s = min_step_timeout_s / LOOKS_PER_TIMEOUT
        self._stall = Stall(self._interval_s, idle_share=_IDLE_SHARE)
        self._watch = Watch(self._interval_s, self._look)

    @classmethod
    def of(
        cls,
        ranks: Sequence[RankHandle],
        manifest: Manifest,
        min_step_timeout_s: float,
        on_hung: Callable[[RankHung], None],
    ) -> Self:
        """Makes one that waits at least as long as the library of a device does, which knows more of it."""
        executable_format = name_format(manifest)
        if not executable_format:
            return cls(ranks, min_step_timeout_s, on_hung)
        device = find_format(executable_format)
        step_timeout_s = max(min_step_timeout_s, device.find_step_timeout_s(manifest.limits.max_length))
        return cls(ranks, step_timeout_s, on_hung, min_load_timeout_s=device.load_timeout_s)

    def stop(self) -> None:
        """Looks no more. Calling it again is harmless."""
        self._watch.stop()

    def note_step(self, duration_s: float) -> None:
        """Takes the duration of a step that has ended, in seconds."""
        if duration_s > self._slowest_step_s:
            # The clock of the rank goes on while it is stopped together with this process: no look has seen that time.
            seen_s = self._stall.unfinished_s + 2 * self._interval_s
            self._slowest_step_s = max(self._slowest_step_s, min(duration_s, seen_s))

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Gives steps a tenth of their time until the block ends."""
        self._num_hurrying += 1
        try:
            yield
        finally:
            self._num_hurrying -= 1

    def _look(self) -> None:
        # The forkserver's watch looks after a rank that has not been forked yet.
        called = [(rank, rank.pid, rank.oldest_call) for rank in self._ranks]
        waiting = [(rank, pid, oldest) for rank, pid, oldest in called if pid is not None and oldest is not None]
        numbers = tuple((rank.rank, oldest.number) for rank, _, oldest in waiting)
        self._stall.look(numbers or None, [pid for _, pid, _ in waiting])
        if not waiting:
            return
        call = waiting[0][2].call
        limit_s = max(self._min_step_timeout_s, STEP_FACTOR * self._slowest_step_s)
        if self._num_hurrying and isinstance(call, RunStep):
            limit_s /= HURRY_DIVISOR
        if isinstance(call, Load):
            limit_s = max(limit_s, self._min_load_timeout_s)
        is_bounded = not isinstance(call, _LONG_CALLS)
        is_still = self._stall.still_s >= limit_s
        if is_still or (is_bounded and self._stall.unfinished_s >= BUSY_FACTOR * limit_s):
            self.stop()
            stopped = [rank for rank, pid, _ in waiting if is_stopped(pid)]
            how = "is stopped" if stopped else "computes nothing" if is_still else "computes without end"
            what = "its start" if isinstance(call, Launch) else type(call).__name__
            rank = stopped[0] if stopped else waiting[0][0]
            self._on_hung(RankHung(rank.rank, what, self._stall.unfinished_s, how))
