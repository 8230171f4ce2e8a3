"""An action of a compiler whose processes die meanwhile, and what has to be true behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, Final

from kiln.bundle.v1 import bundle_pb2

from bundle.store.layout import Layout
from compiler_svc.builds.finished_shards import list_finished_shards
from tests.hang_guard import HANG_S
from tests.leftovers import Moment, find_leaks, find_left
from tests.memory_files import list_mapped, list_opened
from tests.processes import living_descendants, name_of
from tests.servers.compiler_process import wait_until_gone
from tests.servers.stores import check_store, list_needed_blobs
from tests.system.kills.compiler_actions import (
    ACTIONS,
    KEPT_ALIAS,
    Outcome,
    RestartedCompiler,
    digest_of,
    discard,
    provide_base,
)
from tests.system.kills.compiler_matrix import REASONS, STALLED, WITH_FORKSERVER
from tests.system.kills.kill import OPERATION, Death, Kill
from tests.system.kills.points import Before, Point, list_lowered, list_sharded

#: Children that a compiler keeps.
KEPT_CHILDREN: Final = {"kiln-plans", "kiln-fetches", "kiln-builds", "kiln-lowerings"}
#: Actions that a compiler does not resume when it is started again.
CALLS: Final = {"plan", "plan a URL", "import", "collect", "delete"}
_numbers = count()
#: By action, the bundle that builds make of equal inputs, disturbed or not.
_digests: dict[str, str] = {}


class Attempt:
    """An action, and the deaths that it meets."""

    def __init__(self, compiler: RestartedCompiler, action: str) -> None:
        self.number = next(_numbers)
        self.outcome = Outcome()
        self._compiler = compiler
        self._action = action
        self._num_tries = 0
        self._acting: asyncio.Task[Outcome] | None = None
        #: What the deaths so far have left of finished work.
        self._finished: dict[Path, object] = {}

    async def meet(self, death: Death[Point], following: Point | None) -> None:
        """Does the action, or goes on with it, up to a death; then it may go on up to a following point."""
        compiler = self._compiler
        if isinstance(death.point, Before):
            await compiler.strike(death, "")
        if self._acting is None or self._acting.done():
            await self._begin(death.point)
        assert self._acting is not None
        reached = asyncio.create_task(death.point.wait(compiler))
        await first(reached, self._acting)
        assert reached.done(), f"{self._acting.result()} before {death.point}"
        finished = list_finished(compiler.home)
        assert finished.items() >= {path: one for path, one in self._finished.items() if path.exists()}.items()
        self._finished |= finished
        victims = compiler.find(death.victim)[:1]
        if not isinstance(death.point, Before):
            await compiler.strike(death, self._announced.result())
        if death.victim == "compiler":
            if following is not None:
                following.order(compiler)
            await compiler.start()
        else:
            self.outcome = await self._acting
            check_outcome(self.outcome, death, self._action)
            await wait_until_gone(*victims)

    async def _begin(self, point: Point) -> None:
        self._num_tries += 1
        self._announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        identity = f"{self.number}/{self._num_tries}"

        def announce(operation: str) -> None:
            if self._action in CALLS:
                # What it did beforehand does not count.
                point.order(self._compiler)
            self._announced.set_result(operation)

        if self._action not in CALLS:
            point.order(self._compiler)
        self._acting = asyncio.create_task(ACTIONS[self._action](self._compiler, identity, announce))
        await first(self._announced, self._acting)

    async def end(self, death: Death[Point]) -> Outcome:
        """How the action ends behind the last death that it met."""
        assert self._acting is not None
        self.outcome = await self._acting
        check_outcome(self.outcome, death, self._action)
        return self.outcome

    async def repeat(self) -> Outcome:
        """Does the same once more, undisturbed."""
        self._compiler.halt.withdraw()
        return await ACTIONS[self._action](self._compiler, f"{self.number}/{self._num_tries + 1}", lambda _: None)


async def disturb(compiler: RestartedCompiler, kill: Kill[Point]) -> Attempt:
    """Does the action until all of its victims have died."""
    attempt = Attempt(compiler, kill.action)
    for death, following in zip_longest(kill.deaths, kill.deaths[1:]):
        await attempt.meet(death, following and following.point)
        if following is not None and death.victim != "compiler":
            await collect_between(compiler)
    await attempt.end(kill.deaths[-1])
    return attempt


def check_outcome(outcome: Outcome, death: Death[Point], action: str) -> None:
    """Makes sure that an action has ended as one may that meets this death."""
    is_lost = death.victim == "compiler" and action in CALLS
    may = {"", *REASONS[death.victim], *(("INTERRUPTED",) if is_lost else ())}
    assert outcome.reason in ({death.reason} if death.reason else may), outcome
    if outcome.reason == "BUILD_STALLED":
        assert STALLED in outcome.detail
    elif outcome.reason and death.victim in {"kiln-builds", "kiln-lowerings"}:
        assert WITH_FORKSERVER.search(outcome.detail)


async def collect_between(compiler: RestartedCompiler) -> None:
    """A collection leaves the shards that the next attempt takes over."""
    await compiler.running.client.bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest())
    store = Layout(compiler.home / "store")
    if not [*store.root.glob("jobs/*/aside")]:
        assert list_finished_shards(store.root / "jobs") <= set(store.list_blobs())


def list_finished(home: Path) -> dict[Path, object]:
    """Records of finished work, and which file each is: what is done again is written anew."""
    found: dict[Path, object] = {}
    for path in (*list_lowered(home), *list_sharded(home)):
        # A build that has ended removes its own.
        with suppress(FileNotFoundError):
            status = path.stat()
            found[path] = status.st_ino, status.st_mtime_ns
    return found


async def first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def warm_up(compiler: RestartedCompiler, action: str) -> None:
    """Does the action undisturbed, for what it starts and leaves running."""
    assert await ACTIONS[action](compiler, f"{next(_numbers)}/0", lambda _: None) == Outcome()
    await discard(compiler)


async def check(compiler: RestartedCompiler, moment: Moment) -> None:
    """Makes sure that bundles are whole, and that everything is gone whose moment has come."""
    home = compiler.home
    places = {
        "store": home / "store",
        "models": home / "models",
        "compiler cache": home / "cache",
        "temporary": home / "temporary",
    }
    check_store(home)
    assert find_leaks(places) == []
    await until_gone(lambda: find_left(places, moment, kept=list_needed_blobs(home)))
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


async def check_kill(compiler: RestartedCompiler, kept: str, kill: Kill[Point]) -> None:
    """Makes sure that after a row the same succeeds, and nothing is left but the bundle that no row may change."""
    if kill.action == "shard" and not compiler.has_base:
        await provide_base(compiler)
    compiler.halt.withdraw()
    if isinstance(kill.deaths[0].point, Before):
        await warm_up(compiler, kill.action)
    attempt = await disturb(compiler, kill)
    is_lost = kill.victims == {"compiler"} and kill.action in CALLS
    # What resumes goes on after the start.
    await check(compiler, Moment.STARTED if is_lost else Moment.NOTICED)
    if kill.victims == {OPERATION}:
        assert attempt.outcome.reason == "COMPILE_CANCELLED"
        assert list((compiler.home / "store" / "jobs").iterdir()) == []
    again = await attempt.repeat()
    assert again == Outcome()
    if again.digest:
        # An operation that came to its end has made the bundle already.
        assert attempt.outcome.digest in {"", again.digest}
        if kill.action not in _digests and len(kill.deaths) > 1:
            # No other row makes it: it is made once more, undisturbed.
            _digests[kill.action] = (await Attempt(compiler, kill.action).repeat()).digest
        # Neuron's compiler writes other bytes each time.
        assert _digests.setdefault(kill.action, again.digest) == again.digest or "trn2" in kill.action
        assert await digest_of(compiler, "tiny") == again.digest
    assert await digest_of(compiler, KEPT_ALIAS) == kept
    await discard(compiler)
    assert await ACTIONS["collect"](compiler, f"{next(_numbers)}/3", lambda _: None) == Outcome()
    await check(compiler, Moment.COLLECTED)
