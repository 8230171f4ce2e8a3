"""SIGKILL, or SIGSTOP, of each process of a runtime in the middle of each action: it serves again, nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import psutil
import pytest
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.hang_guard import HANG_S
from tests.leftovers import Moment, find_leaks, find_left
from tests.memory_files import list_mapped, list_opened
from tests.processes import lives
from tests.servers.answers import reason_of
from tests.servers.stack import Stack
from tests.system.kills.kill import Death, Kill, as_parameters
from tests.system.kills.runtime_actions import ACTIONS, BEGUN, PLACE, Fleet, assert_serves, provide_fleet
from tests.system.kills.runtime_matrix import EVERYONE, RANKS, REASONS, RUNTIME_KILLS, TEXTS
from tests.system.runtime_process import (
    RuntimeProcess,
    State,
    assert_blobs_are_whole,
    run_runtime,
    send,
    wait_until,
)

NUM_CORES: Final = 4
#: How often a load is begun that ends before its rank dies.
ATTEMPTS: Final = 10
#: In which a step has to show that it runs, so that hung ranks are noticed soon.
STEP_TIMEOUT_S: Final = 2


@pytest.fixture(scope="module")
def process(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    directory = tmp_path_factory.mktemp("kills")
    for name in ("files", "run"):
        (directory / "temporary" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TMPDIR", str(directory / "temporary" / "files"))
        patch.setitem(os.environ, "XDG_RUNTIME_DIR", str(directory / "temporary" / "run"))
        options = {"state": directory / "state", "capture-directory": directory / "captures"}
        options["min-step-timeout"] = STEP_TIMEOUT_S
        words = [f"--{name}={value}" for name, value in options.items()]
        with run_runtime(stack.compiler, directory, *words) as started:
            yield started


@pytest.fixture(scope="module")
def fleet(stack: Stack, process: RuntimeProcess) -> Fleet:
    return provide_fleet(stack, process)


@pytest.fixture(scope="module")
def loaded(process: RuntimeProcess, fleet: Fleet) -> Counter[str]:
    """What the front has open for one deployment that serves."""
    process.load(fleet.story, **PLACE)
    process.generate()
    found = list_open(process)
    process.unload()
    return found


def list_memory_files(process: RuntimeProcess) -> list[str]:
    """Names of the memory files that the front has open or mapped."""
    front = process.processes()[0].pid
    return [*list_opened(front), *list_mapped(front)]


def list_open(process: RuntimeProcess) -> Counter[str]:
    """How many memory files, pipes and process descriptors the front has open."""
    found = Counter(list_memory_files(process))
    for fd in Path(f"/proc/{process.processes()[0].pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            kind, _, what = str(fd.readlink()).partition(":")
            if kind == "pipe" or what == "[pidfd]":
                found[kind] += 1
    return found


def slay(process: RuntimeProcess, death: Death[str], stopped: list[psutil.Process]) -> list[psutil.Process]:
    """Sends a process the signal, which has been stopped or may still have to start; returns the ranks before that."""
    wait_until(lambda: death.victim == EVERYONE or (stopped or process.find(death.victim)) != [])
    if death.reason == "RANK_DIED":
        wait_until(lambda: len(process.ranks()) == len(RANKS))
    ranks, victims = process.ranks(), stopped or process.find(death.victim)
    if death.victim == "runtime":
        process.kill()
    elif death.victim == EVERYONE:
        pause([*process.processes(), *ranks])
    elif victims:
        if death.reason == "RANK_DIED":
            for other in {*ranks} - {victims[0]}:
                other.suspend()
        send(victims[0], death.number)
        # A dying forkserver still takes requests until the kernel has closed its sockets.
        wait_until(lambda: death.number == signal.SIGSTOP or not lives(victims[0]))
    return ranks


def pause(processes: list[psutil.Process]) -> None:
    """Stops processes for longer than a step may take."""
    for one in processes:
        one.suspend()
    time.sleep(STEP_TIMEOUT_S + 1)
    for one in processes:
        one.resume()


@dataclass
class Disturbed:
    """An action that met a death.

    Attributes:
        ranks: Those that there were.
        reason: With which the action ended; empty if it did not fail.
        result: What it returned.
        answered_epoch: Of the last load before the death that the runtime has answered.
    """

    ranks: list[psutil.Process] | None = None
    reason: str = ""
    result: runtime.LoadWeightsResult | None = None
    answered_epoch: int = 0


def disturb(process: RuntimeProcess, fleet: Fleet, action: str, death: Death[str]) -> Disturbed:
    """Does the action and kills the victim meanwhile, and waits until the ranks of that time have gone."""
    disturbed, once = Disturbed(), threading.Lock()
    # What is there stands still as soon as the point is reached, however long the look for the others takes.
    victims = process.find(death.victim)[:1]

    def reached() -> None:
        with once:
            if disturbed.ranks is None:
                for victim in victims:
                    send(victim, signal.SIGSTOP)
                disturbed.ranks = slay(process, death, victims)

    try:
        disturbed.result = ACTIONS[action](process, fleet, death.point, reached)
    except grpc.RpcError as error:
        disturbed.reason = reason_of(error) or "INTERRUPTED"
    except ValueError:
        # The channel was closed together with the runtime.
        disturbed.reason = "INTERRUPTED"
    disturbed.answered_epoch = process.answered_epoch
    ranks = disturbed.ranks
    assert ranks is not None, f"no {death.point}: {disturbed.reason}"
    if death.victim == "runtime":
        process.start()
    if death.victim == EVERYONE:
        assert process.ranks() == ranks
    elif death.victim not in TEXTS:
        wait_until(lambda: has_noticed(process, ranks))
    return disturbed


def disturb_in_time(process: RuntimeProcess, fleet: Fleet, action: str, death: Death[str]) -> Disturbed:
    """Does as `disturb`, and loads again if the load had ended before its rank died.

    So small a model may be loaded before its ranks are stopped, where other programs have the processors.
    """
    for _ in range(ATTEMPTS):
        disturbed = disturb(process, fleet, action, death)
        if disturbed.reason or (action, death.reason) != ("load", "RANK_DIED"):
            break
        process.unload()
    return disturbed


def has_noticed(process: RuntimeProcess, dead: list[psutil.Process]) -> bool:
    """Whether ranks have gone and their runtime knows it: others live, or the deployment does not claim to serve."""
    living = process.ranks()
    if living or not process.ids():
        return not {*living} & {*dead}
    return process.get().state != State.STATE_READY


def settle(process: RuntimeProcess, fleet: Fleet, *, has_failed: bool) -> tuple[str, int]:
    """Waits until the deployment serves; returns the digest and the epoch of its weights.

    Args:
        has_failed: Whether its load may have been given up, or its unload been done, so that it is loaded again.
    """
    if process.ids() and process.wait_for("READY", "FAILED").state != State.STATE_READY:
        assert has_failed, process.get().message
        process.unload()
    if not process.ids():
        assert has_failed
        process.load(fleet.story, **PLACE)
    assert list(process.get().cores) == PLACE["cores"]
    weights = assert_serves(process, fleet)
    # Text processes, and their forkserver, start again when a prompt of text comes.
    process.generation.Tokenize(generation.TokenizeRequest(deployment_id="d", text="Once"))
    return weights


def check_failed_load(process: RuntimeProcess) -> None:
    """A load that lost a rank holds nothing."""
    assert process.get().state == State.STATE_FAILED
    assert process.ranks() == []
    assert process.control.GetServerInfo(runtime.GetServerInfoRequest()).free_cores == NUM_CORES


def check_weights(
    action: str, before: tuple[str, int], now: tuple[str, int], fleet: Fleet, disturbed: Disturbed
) -> None:
    """A swap has happened or has not, never in half, and no epoch comes back behind one that was answered."""
    swapped = (fleet.other(before[0]), before[1] + 1)
    match action:
        case "swap unrecorded":
            assert now[1] == disturbed.answered_epoch
        case "swap":
            assert now in {before, swapped}
            assert disturbed.result is None or now == swapped
        case "swap and rest":
            assert now == swapped
        case _:
            assert now == before


def check(process: RuntimeProcess, moment: Moment) -> None:
    """Makes sure that everything is gone whose moment has come."""
    places = {"runtime cache": "cache", "state": "state", "captures": "captures", "temporary": "temporary"}
    paths = {place: process.directory / name for place, name in places.items()}
    assert find_leaks(paths) == []
    wait_until_equal(lambda: find_left(paths, moment), [])


def wait_until_equal(find: Callable[[], object], expected: object, timeout_s: float = HANG_S) -> None:
    end_s = time.monotonic() + timeout_s
    while (found := find()) != expected:
        assert time.monotonic() < end_s, f"{found} is not {expected}"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def emptied(process: RuntimeProcess, loaded: Counter[str]) -> None:
    """A row begins without deployments, whatever the one before it has left."""
    for deployment_id in process.ids():
        process.unload(deployment_id)


@pytest.mark.parametrize("kill", as_parameters(RUNTIME_KILLS))
@pytest.mark.timeout(600)
def test_kill(process: RuntimeProcess, fleet: Fleet, loaded: Counter[str], kill: Kill[str]) -> None:
    (death,) = kill.deaths
    before = (fleet.story, 1)
    if kill.action != "load":
        process.load(fleet.story, **PLACE)
    disturbed = disturb_in_time(process, fleet, kill.action, death)
    # What stands still so that a call does not end may be noticed before the death is.
    may = {"", *REASONS[death.victim], *({"RANK_HUNG"} if death.point == BEGUN else ())}
    assert disturbed.reason in ({death.reason} if death.reason else may)
    if kill.action == "generate" and death.victim in RANKS and death.point == "1":
        assert disturbed.reason, "streams go on"
    assert_blobs_are_whole(process.directory / "cache")
    if death.reason == "RANK_DIED":
        check_failed_load(process)
    # A runtime goes on with a load that it has resolved; other deaths may end a load.
    is_resumed = death.victim == "runtime" and death.point != "RESOLVE"
    may_fail = kill.action == "unload" or (kill.action == "load" and not is_resumed)
    now = settle(process, fleet, has_failed=may_fail)
    check_weights(kill.action, before, now, fleet, disturbed)
    wait_until_equal(lambda: (len(process.ranks()), process.get().load.used_slots), (len(RANKS), 0))
    wait_until_equal(lambda: list_open(process), loaded)
    check(process, Moment.STARTED if death.victim == "runtime" else Moment.NOTICED)
    if kill.action == "load":
        process.unload()
    again = ACTIONS[kill.action](process, fleet, death.point, lambda: None)
    assert again is None or again.weight_epoch == now[1] + 1
    if process.ids():
        assert_serves(process, fleet)
        process.unload()
    wait_until_equal(lambda: (process.ranks(), list_memory_files(process)), ([], []))
