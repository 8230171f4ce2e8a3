"""What counts as standing still, and when a rank counts as hung."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from execution.errors import RankHung
from execution.forkserver.worker import CallUnderWay
from execution.ranks.control import Call, Load, RunStep, StageWeights, ZeroState
from execution.ranks.watchdog import BUSY_FACTOR, HURRY_DIVISOR, STEP_FACTOR, RankWatchdog
from execution.stall import LOOKS_PER_TIMEOUT, Stall, Watch, is_stopped, read_cpu_s
from tests.bundles.manifests import make_manifest
from tests.bundles.neffs import with_neffs
from tests.hang_guard import until

STEP = RunStep(tag="t", memory_set=0, depends_on_previous=False, top_logprobs=None, return_logits=False)
TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 180.0
INTERVAL_S = TIMEOUT_S / LOOKS_PER_TIMEOUT
#: Above the largest id that Linux gives.
NO_PROCESS = (1 << 22) + 1


def compute(duration_s: float) -> None:
    end_s = time.process_time() + duration_s
    while time.process_time() < end_s:
        pass


def test_the_clock_of_a_process_is_how_long_it_has_computed() -> None:
    before_s = read_cpu_s(os.getpid())
    compute(0.005)
    assert read_cpu_s(os.getpid()) - before_s == pytest.approx(0.005, abs=0.05)
    assert read_cpu_s(os.getpid()) - before_s >= 0.005
    assert read_cpu_s(NO_PROCESS) == 0
    assert not is_stopped(os.getpid())
    assert not is_stopped(NO_PROCESS)


def test_looks_are_counted_while_work_is_the_same() -> None:
    stall = Stall(2.0)
    for work in (1, 2, 2, 2):
        stall.look(work, [NO_PROCESS])
    assert (stall.unfinished_s, stall.still_s) == (4.0, 4.0)
    stall.look(3, [NO_PROCESS])
    assert (stall.unfinished_s, stall.still_s) == (0.0, 0.0)
    for _ in range(3):
        stall.look(None, [])
    assert stall.unfinished_s == 0


@pytest.mark.parametrize(("idle_share", "still_s"), [(0.0, 0.0), (0.5, 2.0)])
def test_a_process_that_computes_does_not_stand_still(idle_share: float, still_s: float) -> None:
    stall = Stall(1.0, idle_share=idle_share)
    for _ in range(3):
        stall.look("work", [os.getpid()])
        compute(0.001)
    assert (stall.unfinished_s, stall.still_s) == (2.0, still_s)


async def test_a_watch_looks_until_it_is_stopped() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            watch.stop()

    watch = Watch(0.001, look)
    await until(lambda: len(looks) >= 3)
    await asyncio.sleep(0.02)
    assert len(looks) == 3


class Harness:
    """A watchdog whose looks a test takes, and the one rank that it looks at."""

    def __init__(self) -> None:
        self.pid = NO_PROCESS
        self.hung: list[RankHung] = []
        self.oldest: CallUnderWay | None = None
        rank: Any = SimpleNamespace(rank=0)
        ranks: Any = [rank]
        self.watchdog = RankWatchdog(ranks, TIMEOUT_S, self.hung.append, min_load_timeout_s=LOAD_TIMEOUT_S)
        self._rank = rank

    def call(self, call: Call | None) -> None:
        number = 0 if self.oldest is None else self.oldest.number + 1
        self.oldest = CallUnderWay(number, call, lambda _: None)

    def look(self, num_looks: int) -> float:
        """Looks as often, or until the rank has hung; returns the seconds of the watchdog's time."""
        self._rank.oldest_call, self._rank.pid = self.oldest, self.pid
        for done in range(num_looks):
            if self.hung:
                return done * INTERVAL_S
            if self.pid != NO_PROCESS:
                compute(0.001)
            self.watchdog._look()
        return num_looks * INTERVAL_S


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr("execution.ranks.watchdog._IDLE_SHARE", 0.0)
    made = Harness()
    yield made
    made.watchdog.stop()


FOREVER = 1000 * LOOKS_PER_TIMEOUT


async def test_a_step_may_take_the_least_time(harness: Harness) -> None:
    harness.call(STEP)
    # The first look begins to count.
    assert harness.look(FOREVER) == TIMEOUT_S + INTERVAL_S


async def test_a_step_may_take_much_longer_than_the_slowest_one(harness: Harness) -> None:
    for duration_s in (0.1, 2.0, 1.0):
        harness.watchdog.note_step(duration_s)
    harness.call(STEP)
    assert harness.look(FOREVER) == pytest.approx(2.0 * STEP_FACTOR + INTERVAL_S, abs=INTERVAL_S)


async def test_time_that_no_look_has_seen_is_no_step_s(harness: Harness) -> None:
    """As after `docker pause`, in which the rank's clock went on."""
    harness.watchdog.note_step(3600.0)
    harness.call(STEP)
    assert harness.look(FOREVER) <= 2 * INTERVAL_S * STEP_FACTOR + 2 * INTERVAL_S


async def test_a_rank_that_computes_has_longer(harness: Harness) -> None:
    harness.pid = os.getpid()
    harness.call(STEP)
    assert harness.look(FOREVER) == TIMEOUT_S * BUSY_FACTOR + INTERVAL_S
    assert "computes without end" in str(harness.hung[0])


@pytest.mark.parametrize(("pid", "factor"), [(NO_PROCESS, 1), (os.getpid(), BUSY_FACTOR)], ids=["still", "computing"])
async def test_an_operation_in_a_hurry_leaves_a_tenth(harness: Harness, pid: int, factor: int) -> None:
    harness.pid = pid
    harness.call(STEP)
    with harness.watchdog.hurrying():
        assert harness.look(FOREVER) == TIMEOUT_S * factor / HURRY_DIVISOR + INTERVAL_S


async def test_calls_that_read_files_may_compute_for_long_and_no_hurry_counts(harness: Harness) -> None:
    harness.pid = os.getpid()
    harness.call(StageWeights(path="p"))
    harness.look(20 * LOOKS_PER_TIMEOUT)
    assert harness.hung == []
    harness.pid = NO_PROCESS
    with harness.watchdog.hurrying():
        assert harness.look(FOREVER) == TIMEOUT_S


async def test_a_load_may_wait_for_its_device(harness: Harness) -> None:
    harness.call(Load())
    assert harness.look(FOREVER) == LOAD_TIMEOUT_S + INTERVAL_S


@pytest.mark.parametrize(("max_length", "limit_s"), [(32_767, TIMEOUT_S), (32_768, 600.0)])
async def test_a_step_of_a_device_may_take_as_long_as_its_library_waits(
    harness: Harness, *, max_length: int, limit_s: float
) -> None:
    manifest = with_neffs(make_manifest())
    limits = msgspec.structs.replace(manifest.limits, max_length=max_length)
    harness.watchdog.stop()
    harness.watchdog = RankWatchdog.of(
        harness.watchdog._ranks, msgspec.structs.replace(manifest, limits=limits), TIMEOUT_S, harness.hung.append
    )
    harness.call(STEP)
    harness.look(FOREVER)
    assert [error.metadata["waited_s"] for error in harness.hung] == [f"{limit_s:g}"]


async def test_calls_that_end_are_forgotten(harness: Harness) -> None:
    for call in (STEP, ZeroState(slots=None), STEP):
        harness.call(call)
        harness.look(LOOKS_PER_TIMEOUT)
    harness.oldest = None
    harness.look(FOREVER)
    assert harness.hung == []
