"""What happens to processes and to the host under a soak: one row for each fault."""

from __future__ import annotations

import asyncio
import errno
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import psutil

from tests.processes import lives
from tests.shortages import limited
from tests.soak.services import Services
from tests.soak.site import READY_TIMEOUT_S, Site
from tests.soak.windows import RANKS_LOST
from tests.system.runtime_process import send

#: Descriptors that are left to a runtime that is short of them.
FEW_DESCRIPTORS: Final = 4
NOT_READY: Final = frozenset({"DEPLOYMENT_NOT_READY"})
SHORT: Final = frozenset({"RESOURCES_SHORT"})
TEXT_LOST: Final = frozenset({"TEXT_PROCESS_LOST"})


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
Act = Callable[[Services, random.Random], AbstractContextManager[list[psutil.Process]]]


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        weight: How often it is chosen, in proportion.
        act: Does it, and undoes it when the block ends; gives processes that have to end before.
        lasts_s: Between which times until it is undone.
        streams, calls: Reasons with which streams, and calls of the control plane, may end meanwhile.
    """

    name: str
    weight: int
    act: Act
    lasts_s: tuple[float, float] = (0.0, 0.0)
    streams: frozenset[str] = RANKS_LOST
    calls: frozenset[str] = RANKS_LOST | NOT_READY


def strike(services: Services, choose: random.Random, victim: str, number: signal.Signals) -> list[psutil.Process]:
    """Sends a signal to one of the processes of a name; `ranks` are those of any deployment."""
    found = services.runtime.ranks() if victim == "ranks" else services.runtime.find(victim)
    chosen = [choose.choice(found)] if found else []
    for process in chosen:
        send(process, number)
    return chosen


def end(*signals: tuple[str, signal.Signals]) -> Act:
    """Sends signals, each to one process of a name; all of these have to end."""

    @contextmanager
    def act(services: Services, choose: random.Random) -> Iterator[list[psutil.Process]]:
        yield [one for victim, number in signals for one in strike(services, choose, victim, number)]

    return act


def pause(victim: str) -> Act:
    """Stops one process of a name for a while."""

    @contextmanager
    def act(services: Services, choose: random.Random) -> Iterator[list[psutil.Process]]:
        stopped = strike(services, choose, victim, STOP)
        try:
            yield []
        finally:
            go_on(stopped)

    return act


def go_on(stopped: list[psutil.Process]) -> None:
    """Lets stopped processes run again."""
    for process in stopped:
        send(process, signal.SIGCONT)


@contextmanager
def fill_disk(services: Services, _choose: random.Random) -> Iterator[list[psutil.Process]]:
    """Writes until there is no room left."""
    ballast = services.disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    try:
        yield []
    finally:
        ballast.unlink()


@contextmanager
def take_descriptors(services: Services, choose: random.Random) -> Iterator[list[psutil.Process]]:
    """Leaves the runtime few descriptors more than it has, and kills a rank."""
    front = services.front
    with limited(resource.RLIMIT_NOFILE, front.num_fds() + FEW_DESCRIPTORS, front.pid):
        strike(services, choose, "ranks", signal.SIGKILL)
        yield []


_SHORT_OR_LOST: Final = SHORT | RANKS_LOST | {""}
FAULTS: Final = (
    Fault("kill a rank", 4, end(("ranks", KILL))),
    Fault("stop a rank", 3, end(("ranks", STOP))),
    Fault("stop a rank for a moment", 2, pause("ranks"), (0.05, 0.5)),
    Fault("kill a forkserver", 2, end(("kiln-forkserver", KILL))),
    Fault("stop a forkserver", 1, pause("kiln-forkserver"), (0.5, 3.0)),
    # It cannot report the end, nor fork another rank.
    Fault("stop a forkserver, kill a rank", 2, end(("kiln-forkserver", STOP), ("ranks", KILL))),
    Fault("fill the disk", 2, fill_disk, (1.0, 4.0), SHORT | {"CAPTURE_UNWRITABLE"}, SHORT | {"STATE_UNWRITABLE"}),
    Fault("take descriptors, kill a rank", 2, take_descriptors, (1.0, 6.0), _SHORT_OR_LOST, _SHORT_OR_LOST | NOT_READY),
    Fault("kill a text process", 2, end(("kiln-text", KILL)), streams=TEXT_LOST, calls=TEXT_LOST),
    Fault("kill the forkserver of text processes", 2, end(("kiln-texts", KILL)), streams=TEXT_LOST, calls=TEXT_LOST),
    # Longer than `--text-timeout` allows, now and then. One that no prompt needs meanwhile goes on.
    Fault("stop a text process", 2, pause("kiln-text"), (0.5, 20.0), TEXT_LOST, TEXT_LOST),
)


async def inflict(site: Site, fault: Fault, choose: random.Random) -> None:
    """Does a fault, undoes it, and waits until every lasting deployment serves again.

    Raises:
        SiteLost: One does not.
    """
    with site.windows.open(fault.name, fault.streams, fault.calls):
        with fault.act(site.services, choose) as ending:
            await asyncio.sleep(choose.uniform(*fault.lasts_s))
            await _wait_until_ended(site, fault, ending)
        await site.wait_ready(fault.name)


async def _wait_until_ended(site: Site, fault: Fault, processes: list[psutil.Process]) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + READY_TIMEOUT_S
    while left := [one for one in processes if lives(one)]:
        if loop.time() > end_s:
            site.find(f"{fault.name}: {len(left)} processes did not end in {READY_TIMEOUT_S:g} s")
            go_on(left)
            return
        await asyncio.sleep(0.05)


def choose_faults(services: Services) -> tuple[list[Fault], dict[str, str]]:
    """The rows that are on here, and by name why others are not."""
    left_out = [fault for fault in FAULTS if fault.act is fill_disk and not services.is_small]
    return [one for one in FAULTS if one not in left_out], {one.name: "a small disk takes root" for one in left_out}
