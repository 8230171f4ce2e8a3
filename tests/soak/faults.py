"""What happens to processes and to the host under a soak: one row for each fault."""

from __future__ import annotations

import asyncio
import errno
import random
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.processes import lives
from tests.soak.services import Services, send
from tests.soak.site import READY_TIMEOUT_S, Site
from tests.soak.windows import RANKS_LOST

BALLAST: Final = "ballast"
#: Descriptors that are left to a runtime that is short of them.
FEW_DESCRIPTORS: Final = 4
NOT_READY: Final = frozenset({"DEPLOYMENT_NOT_READY"})
SHORT: Final = frozenset({"RESOURCES_SHORT"})
TEXT_LOST: Final = frozenset({"TEXT_PROCESS_LOST"})


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: As the report has it.
        weight: How often it is chosen, in proportion.
        act: Does it; returns what `undo` needs, or the processes that have to end.
        undo: Takes it back.
        lasts_s: Between which times until it is undone.
        ends: Whether the processes that `act` returned have to end.
        streams: Reasons with which streams may end meanwhile.
        calls: Reasons with which calls of the control plane may end meanwhile.
        needs_small_disk: Whether it fills the disk.
    """

    name: str
    weight: int
    act: Callable[[Services, random.Random], Any]
    undo: Callable[[Services, Any], None] = lambda _services, _touched: None
    lasts_s: tuple[float, float] = (0.0, 0.0)
    ends: bool = False
    streams: frozenset[str] = RANKS_LOST
    calls: frozenset[str] = RANKS_LOST | NOT_READY
    needs_small_disk: bool = False


def find_ranks(services: Services) -> list[psutil.Process]:
    """Ranks of any deployment."""
    return services.runtime.ranks()


Find = Callable[[Services], list[psutil.Process]]


def named(name: str) -> Find:
    """The runtime's processes of a name that live."""
    return lambda services: [one for one in services.groups().get(name, []) if lives(one)]


find_forkservers = named("kiln-forkserver")


def signal_one(find: Find, number: signal.Signals) -> Callable[[Services, random.Random], list[psutil.Process]]:
    """Sends a signal to one of the processes."""

    def act(services: Services, choose: random.Random) -> list[psutil.Process]:
        found = find(services)
        chosen = [choose.choice(found)] if found else []
        for process in chosen:
            send(process, number)
        return chosen

    return act


def go_on(_services: Services, stopped: list[psutil.Process]) -> None:
    """Lets stopped processes run again."""
    for process in stopped:
        send(process, signal.SIGCONT)


def stop_forkserver_and_kill_rank(services: Services, choose: random.Random) -> list[psutil.Process]:
    """The forkserver cannot report the end, nor fork another rank."""
    stopped = signal_one(find_forkservers, signal.SIGSTOP)(services, choose)
    return stopped + signal_one(find_ranks, signal.SIGKILL)(services, choose)


def fill_disk(services: Services, _choose: random.Random) -> Path:
    """Writes until there is no room left."""
    ballast = services.disk / BALLAST
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return ballast


def free_disk(_services: Services, ballast: Path) -> None:
    """Removes the ballast."""
    ballast.unlink()


def limit_descriptors(services: Services, choose: random.Random) -> tuple[int, int]:
    """Leaves the runtime few descriptors more than it has, and kills a rank; returns the limits that it had."""
    front = services.front
    limits = resource.prlimit(front.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(front.pid, resource.RLIMIT_NOFILE, (front.num_fds() + FEW_DESCRIPTORS, limits[1]))
    signal_one(find_ranks, signal.SIGKILL)(services, choose)
    return limits


def restore_descriptors(services: Services, limits: tuple[int, int]) -> None:
    """Gives the runtime its limits back."""
    resource.prlimit(services.front.pid, resource.RLIMIT_NOFILE, limits)


FAULTS: Final = (
    Fault("kill a rank", 4, signal_one(find_ranks, signal.SIGKILL), ends=True),
    Fault("stop a rank", 3, signal_one(find_ranks, signal.SIGSTOP), ends=True),
    Fault("stop a rank for a moment", 2, signal_one(find_ranks, signal.SIGSTOP), go_on, (0.05, 0.5)),
    Fault("kill a forkserver", 2, signal_one(find_forkservers, signal.SIGKILL), ends=True),
    Fault("stop a forkserver", 1, signal_one(find_forkservers, signal.SIGSTOP), go_on, (0.5, 3.0)),
    Fault("stop a forkserver, kill a rank", 2, stop_forkserver_and_kill_rank, ends=True),
    Fault(
        "fill the disk",
        2,
        fill_disk,
        free_disk,
        (1.0, 4.0),
        streams=SHORT | {"CAPTURE_UNWRITABLE"},
        calls=SHORT | {"STATE_UNWRITABLE"},
        needs_small_disk=True,
    ),
    Fault(
        "take descriptors, kill a rank",
        2,
        limit_descriptors,
        restore_descriptors,
        (1.0, 6.0),
        streams=RANKS_LOST | SHORT | {""},
        calls=RANKS_LOST | NOT_READY | SHORT | {""},
    ),
    *(
        Fault(name, 2, signal_one(named(process), signal.SIGKILL), ends=True, streams=TEXT_LOST, calls=TEXT_LOST)
        for name, process in (
            ("kill a text process", "kiln-text"),
            ("kill the forkserver of text processes", "kiln-texts"),
        )
    ),
    # Longer than `--text-timeout` allows, now and then. One that no prompt needs meanwhile goes on.
    Fault(
        "stop a text process",
        2,
        signal_one(named("kiln-text"), signal.SIGSTOP),
        go_on,
        (0.5, 20.0),
        streams=TEXT_LOST,
        calls=TEXT_LOST,
    ),
)


async def inflict(site: Site, fault: Fault, choose: random.Random) -> None:
    """Does a fault, undoes it, and waits until every lasting deployment serves again.

    Raises:
        SiteLost: One does not.
    """
    services = site.services
    with site.windows.open(fault.name, fault.streams, fault.calls):
        touched = fault.act(services, choose)
        try:
            await asyncio.sleep(choose.uniform(*fault.lasts_s))
            if fault.ends:
                await _wait_until_ended(site, fault, touched)
        finally:
            fault.undo(services, touched)
        await site.wait_ready(fault.name)


async def _wait_until_ended(site: Site, fault: Fault, processes: list[psutil.Process]) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + READY_TIMEOUT_S
    while left := [one for one in processes if lives(one)]:
        if loop.time() > end_s:
            site.find(f"{fault.name}: {len(left)} processes did not end in {READY_TIMEOUT_S:g} s")
            go_on(site.services, left)
            return
        await asyncio.sleep(0.05)


def choose_faults(services: Services) -> tuple[list[Fault], dict[str, str]]:
    """The rows that are on here, and by name why others are not."""
    reasons = {
        fault.name: "a small disk takes root" for fault in FAULTS if fault.needs_small_disk and not services.is_small
    }
    return [fault for fault in FAULTS if fault.name not in reasons], reasons
