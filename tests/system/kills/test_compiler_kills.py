"""SIGKILL of each process of a compiler in the middle of each action: nothing is half done, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.checkpoints.random_weights import write_checkpoint
from tests.hang_guard import HANG_S
from tests.leftovers import Moment, find_leaks, find_left
from tests.memory_files import list_mapped, list_opened
from tests.processes import living_descendants, name_of
from tests.servers.stores import check_store, list_needed_blobs
from tests.system.kills.compiler_actions import ACTIONS, Outcome, RestartedCompiler, provide_base, provide_untokenized
from tests.system.kills.compiler_matrix import COMPILER_KILLS, REASONS, After, Kill

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

#: Children that a compiler keeps.
KEPT_CHILDREN: Final = {"kiln-plans", "kiln-fetches", "kiln-builds", "kiln-lowerings"}
#: A victim may have ended before the signal came: as often the action is done again.
ATTEMPTS: Final = 8
#: Actions that a compiler resumes when it is started again.
OPERATIONS: Final = {"compile", "compile for two ranks", "convert", "lower", "shard"}
_numbers = count()
_durations_s: dict[str, float] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestartedCompiler]:
    """A compiler with directories for temporary files of its own."""
    home = tmp_path_factory.mktemp("kills")
    write_checkpoint(home / "models" / "tiny")
    provide_untokenized(home)
    for name in ("files", "run"):
        (home / "temporary" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TMPDIR", str(home / "temporary" / "files"))
        patch.setitem(os.environ, "XDG_RUNTIME_DIR", str(home / "temporary" / "run"))
        roots = ("--import-root", str(home / "source"), "--model-url", f"file://{home / 'models'}")
        restarted = RestartedCompiler(home, *roots, "--lowerings", "2")
        await restarted.start()
        yield restarted
        await restarted.stop()


def places(home: Path) -> dict[str, Path]:
    return {"store": home / "store", "compiler cache": home / "cache", "temporary": home / "temporary"}


async def disturb(compiler: RestartedCompiler, kill: Kill) -> tuple[Outcome, int]:
    """Does the action and kills the victim meanwhile, again and again until the victim was there to be killed.

    Returns:
        How the action ended, and the number that it was done under.
    """
    for _ in range(ATTEMPTS):
        number = next(_numbers)
        announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        acting = asyncio.create_task(ACTIONS[kill.action](compiler, f"{number}/1", announced.set_result))
        await first(announced, acting)
        point = kill.point
        if isinstance(point, After):
            reached = asyncio.create_task(asyncio.sleep(point.share * _durations_s[kill.action]))
        else:
            reached = asyncio.create_task(point.wait(compiler.running, compiler.home, announced.result()))
        await first(reached, acting)
        reached.cancel()
        has_killed = not acting.done() and await compiler.kill(kill.victim)
        outcome = await acting
        if has_killed:
            return outcome, number
        assert outcome == Outcome()
    raise AssertionError(f"{kill.victim} was never there at {kill.point}")


async def first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def measure(compiler: RestartedCompiler, action: str) -> None:
    """Does the action undisturbed, once, and notes its time from what `After` counts."""
    if action in _durations_s:
        return
    began_s = time.monotonic()

    def announce(_: str) -> None:
        nonlocal began_s
        began_s = time.monotonic()

    for _ in range(2):
        assert await ACTIONS[action](compiler, f"{next(_numbers)}/0", announce) == Outcome()
    _durations_s[action] = time.monotonic() - began_s


async def check(compiler: RestartedCompiler, moment: Moment) -> None:
    """Makes sure that bundles are whole, and that everything is gone whose moment has come."""
    home = compiler.home
    check_store(home)
    assert find_leaks(places(home)) == []
    await until_gone(lambda: find_left(places(home), moment, kept=list_needed_blobs(home)))
    await until_gone(
        lambda: [name for one in living_descendants(compiler.pid) if (name := name_of(one)) not in KEPT_CHILDREN]
    )
    await until_gone(lambda: [*list_opened(compiler.pid), *list_mapped(compiler.pid)])


async def until_gone(find: Callable[[], list[str]], timeout_s: float = HANG_S) -> None:
    """A service removes things after it has told its clients."""
    end_s = time.monotonic() + timeout_s
    while left := find():
        assert time.monotonic() < end_s, left
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "kill",
    [pytest.param(kill, id=str(kill), marks=[] if kill.is_fast else pytest.mark.slow) for kill in COMPILER_KILLS],
)
async def test_kill(compiler: RestartedCompiler, kill: Kill) -> None:
    if kill.action == "shard" and not compiler.has_base:
        await provide_base(compiler)
    if isinstance(kill.point, After):
        await measure(compiler, kill.action)
    outcome, number = await disturb(compiler, kill)
    is_lost = kill.victim == "compiler" and kill.action not in OPERATIONS
    assert outcome.reason in {"", *REASONS[kill.victim], *(("INTERRUPTED",) if is_lost else ())}, outcome
    # What resumes goes on after the start.
    await check(compiler, Moment.STARTED if is_lost else Moment.NOTICED)
    assert await ACTIONS[kill.action](compiler, f"{number}/2", lambda _: None) == Outcome()
    assert await ACTIONS["collect"](compiler, f"{next(_numbers)}/3", lambda _: None) == Outcome()
    await check(compiler, Moment.COLLECTED)
