"""What ends in the background is logged, counted, started again, and shown by health if it ends again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from bundle.errors import KilnError, ResourcesShort
from edge import supervision
from edge.health import BACKGROUND, LIVENESS, OVERALL, Health
from edge.supervision import NUM_FAILURES, Supervisor, begin_task
from tests.hang_guard import HANG_S, until


class Task:
    """A task that ends as a test wants, and counts its starts."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.end: Callable[[], Awaitable[object]] | None = None
        self.woken = asyncio.Event()

    async def run(self) -> None:
        self.num_starts += 1
        self.woken.clear()
        if self.end is None:
            await self.woken.wait()
        assert self.end is not None
        await self.end()


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch) -> Health:
    monkeypatch.setattr(supervision, "FIRST_RESTART_S", 0.01)
    return Health(["kiln.Service"])


@pytest.fixture
async def supervisor(health: Health) -> AsyncIterator[Supervisor]:
    async with Supervisor(lambda is_well: health.set_serving(BACKGROUND, is_well)) as started:
        started.watch_loop()
        yield started


async def fail() -> None:
    raise ZeroDivisionError


async def fail_by_name() -> None:
    raise ResourcesShort("disk space", "No space left on device", 1.0)


async def fail_by_cancellation() -> None:
    never = asyncio.get_running_loop().create_future()
    never.cancel()
    await never


@pytest.mark.parametrize("end", [fail, fail_by_name, fail_by_cancellation, lambda: asyncio.sleep(0)])
async def test_a_task_that_ends_starts_again(supervisor: Supervisor, end: Callable[[], Awaitable[object]]) -> None:
    task = Task()
    supervisor.supervise("leases", task.run)
    await until(lambda: task.num_starts)
    assert supervisor.failures == {"leases": 0}
    task.end = end
    with capture_logs() as logs:
        task.woken.set()
        await until(lambda: supervisor.failures["leases"])
        task.end = None
        await until(lambda: task.num_starts == 2)
    (log,) = logs
    assert (log["event"], log["task"], log["log_level"]) == ("background task ended", "leases", "error")
    if isinstance(log["exc_info"], Exception):
        assert log["exc_info"].__traceback__ is not None


async def test_health_shows_what_fails_again_and_again(
    supervisor: Supervisor, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SETTLED_S", 0.1)
    await health.publish()
    bad, good = Task(), Task()
    supervisor.supervise("bad", bad.run)
    supervisor.supervise("good", good.run)

    def is_serving(name: str) -> bool:
        return health._serving[name]

    bad.end = fail
    for number in range(1, NUM_FAILURES):
        await until(lambda number=number: supervisor.failures["bad"] == number)  # type: ignore[misc]
        assert is_serving(BACKGROUND)
    await until(lambda: supervisor.failures["bad"] == NUM_FAILURES)
    assert not is_serving(BACKGROUND)
    assert all(map(is_serving, (OVERALL, LIVENESS, "kiln.Service")))
    bad.end = None
    await until(lambda: is_serving(BACKGROUND))
    # It has been well in between.
    bad.end = fail
    num_failures = supervisor.failures["bad"]
    bad.woken.set()
    await until(lambda: supervisor.failures["bad"] == num_failures + 1)
    assert is_serving(BACKGROUND)
    assert good.num_starts == 1


async def test_delays_grow_until_a_task_is_well(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "MAX_RESTART_S", 0.04)
    monkeypatch.setattr(supervision, "SETTLED_S", 0.2)
    task = Task()
    task.end = fail
    delays_s: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        delays_s.append(delay_s)
        await real_sleep(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    supervisor.supervise("bad", task.run)
    while len(delays_s) < 4:
        await real_sleep(0.005)
    for delay_s, most_s in zip(delays_s, (0.01, 0.02, 0.04, 0.04), strict=False):
        assert 0.75 * most_s <= delay_s <= most_s
    task.end = None
    await real_sleep(0.3)
    del delays_s[:]
    task.end = fail
    task.woken.set()
    while not delays_s:
        await real_sleep(0.005)
    assert delays_s[0] <= 0.01


async def test_closing_ends_every_task(health: Health) -> None:
    ended = []

    async def run() -> None:
        try:
            await asyncio.sleep(HANG_S)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    with capture_logs() as logs:
        async with Supervisor(lambda _: None) as supervisor:
            supervisor.watch_loop()
            supervisor.supervise("leases", run)
            supervisor.supervise("following", run)
            await asyncio.sleep(0.01)
    assert (ended, logs) == ([True, True], [])
    assert asyncio.get_running_loop().get_exception_handler() is None


async def test_errors_that_no_one_awaits_are_counted(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def look() -> None:
        raise ZeroDivisionError

    with capture_logs() as logs:
        loop.call_soon(look)
        begin_task(fail(), tasks)
        await until(lambda: supervisor.failures.total() == 2)
    name = "test_errors_that_no_one_awaits_are_counted.<locals>.look"
    assert supervisor.failures == {name: 1, "fail": 1}
    assert {log["task"]: type(log["exc_info"]) for log in logs} == {name: ZeroDivisionError, "fail": ZeroDivisionError}
    assert not tasks


async def test_a_named_error_of_a_short_task_is_logged(supervisor: Supervisor) -> None:
    tasks: set[asyncio.Task[None]] = set()
    with capture_logs() as logs:
        task = begin_task(fail_by_name(), tasks)
        with pytest.raises(KilnError):
            await task
        await asyncio.sleep(0)
    assert [(log["event"], log["reason"]) for log in logs] == [("task failed", "RESOURCES_SHORT")]
    assert not supervisor.failures
