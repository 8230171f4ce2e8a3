"""SIGKILL of each process of a runtime in the middle of each action: it serves again, whole, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import psutil
import pytest
from grpc_status import rpc_status
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.hang_guard import HANG_S
from tests.leftovers import Moment, find_leaks, find_left
from tests.memory_files import list_mapped, list_opened
from tests.processes import lives, living_descendants, name_of
from tests.servers.stack import Stack, token_request
from tests.system.fleet import Fleet, assert_serves, provide_fleet, run_until
from tests.system.kills.runtime_matrix import REASONS, RUNTIME_KILLS, TEXTS, Kill
from tests.system.runtime_process import (
    PROMPT,
    RuntimeProcess,
    assert_blobs_are_whole,
    reason_of,
    run_runtime,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ABORT: Final = runtime.IN_FLIGHT_POLICY_ABORT
#: Calls `reached` at the point of the matrix, and goes on.
Action = Callable[[RuntimeProcess, Fleet, str, Callable[[], None]], None]


@pytest.fixture(scope="module")
def process(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    directory = tmp_path_factory.mktemp("kills")
    for name in ("files", "run"):
        (directory / "temporary" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TMPDIR", str(directory / "temporary" / "files"))
        patch.setitem(os.environ, "XDG_RUNTIME_DIR", str(directory / "temporary" / "run"))
        options = (f"--state={directory / 'state'}", f"--capture-directory={directory / 'captures'}")
        with run_runtime(stack.compiler, directory, *options) as started:
            yield started


@pytest.fixture(scope="module")
def fleet(stack: Stack, process: RuntimeProcess) -> Fleet:
    return provide_fleet(stack, process)


@pytest.fixture(scope="module")
def loaded(process: RuntimeProcess, fleet: Fleet) -> Counter[str]:
    """What the front has open for one deployment that serves."""
    process.load(fleet.story)
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


def load(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    events = process.control.LoadBundle(runtime.LoadBundleRequest(ref=fleet.story, deployment_id="d"))
    run_until(events, point)
    reached()
    list(events)


def swap(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    now = process.get().roles[0].weights_digest
    other = fleet.pirate if now == fleet.story else fleet.story
    events = process.control.LoadWeights(runtime.LoadWeightsRequest(deployment_id="d", ref=other))
    run_until(events, point)
    reached()
    list(events)


def generate(
    process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None], *, captured_steps: int = 0
) -> None:
    request = token_request("d", PROMPT, 150, temperature=0.0)
    if captured_steps:
        request.output.capture_inputs.num_steps = captured_steps
    seen = 0
    for event in process.generation.Generate(request, timeout=60):
        seen += len(event.delta.tokens)
        if seen >= int(point):
            reached()


def tokenize(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    request = generation.TokenizeRequest(deployment_id="d", text="Once upon a time " * 2000)
    answer = process.generation.Tokenize.future(request, timeout=60)
    time.sleep(int(point) / 1000)
    reached()
    answer.result()


def capture(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    generate(process, fleet, point, reached, captured_steps=100)


def reset(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    request = runtime.ResetKVCacheRequest(
        deployment_id="d", deployment=runtime.DeploymentScope(), in_flight_policy=ABORT
    )
    answer = process.control.ResetKVCache.future(request)
    time.sleep(int(point) / 1000)
    reached()
    answer.result()


def unload(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    answer = process.control.UnloadBundle.future(runtime.UnloadBundleRequest(deployment_id="d", in_flight_policy=ABORT))
    time.sleep(int(point) / 1000)
    reached()
    answer.result()


ACTIONS: Final[Mapping[str, Action]] = {
    "load": load,
    "swap": swap,
    "generate": generate,
    "tokenize": tokenize,
    "capture": capture,
    "reset": reset,
    "unload": unload,
}


def find(process: RuntimeProcess, victim: str) -> psutil.Process | None:
    """The living process of that name; a rank may not have been forked yet."""
    front = process.processes()[0]
    if victim == "runtime":
        return front
    return next((child for child in living_descendants(front.pid) if name_of(child) == victim), None)


def slay(process: RuntimeProcess, name: str) -> list[psutil.Process]:
    """Kills a process, which may still have to start; returns the ranks that there were."""
    wait_until(lambda: find(process, name) is not None)
    ranks, victim = process.ranks(), find(process, name)
    if name == "runtime":
        process.kill()
    elif victim is not None:
        os.kill(victim.pid, signal.SIGKILL)
        # A dying forkserver still takes requests until the kernel has closed its sockets.
        wait_until(lambda: not lives(victim))
    return ranks


def disturb(process: RuntimeProcess, fleet: Fleet, kill: Kill) -> str:
    """Does the action and kills the victim meanwhile, and waits until the ranks of that time have gone.

    Returns:
        The reason with which the action ended; empty if it did not fail.
    """
    ranks: list[psutil.Process] | None = None
    reason = ""

    def reached() -> None:
        nonlocal ranks
        if ranks is None:
            ranks = slay(process, kill.victim)

    try:
        ACTIONS[kill.action](process, fleet, kill.point, reached)
    except grpc.RpcError as error:
        reason = "INTERRUPTED" if rpc_status.from_call(error) is None else reason_of(error)
    except ValueError:
        # The channel was closed together with the runtime.
        reason = "INTERRUPTED"
    assert ranks is not None, f"no {kill.point}: {reason}"
    if kill.victim == "runtime":
        process.start()
    if kill.victim not in TEXTS:
        wait_until(lambda: has_noticed(process, ranks))
    return reason


def has_noticed(process: RuntimeProcess, dead: list[psutil.Process]) -> bool:
    """Whether ranks have gone and their runtime knows it: others live, or the deployment does not claim to serve."""
    living = process.ranks()
    if living or not process.ids():
        return not {*living} & {*dead}
    return process.get().state != runtime.Deployment.STATE_READY


def settle(process: RuntimeProcess, fleet: Fleet) -> None:
    """Waits until the deployment serves. One whose load was interrupted is FAILED, or gone, and is loaded again."""
    if process.ids() and process.wait_for("READY", "FAILED").state != runtime.Deployment.STATE_READY:
        process.unload()
    if not process.ids():
        process.load(fleet.story)
    assert_serves(process, fleet)
    # Text processes, and their forkserver, start again when a prompt of text comes.
    process.generation.Tokenize(generation.TokenizeRequest(deployment_id="d", text="Once"))


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


@pytest.mark.parametrize("kill", RUNTIME_KILLS, ids=str)
def test_kill(process: RuntimeProcess, fleet: Fleet, loaded: Counter[str], kill: Kill) -> None:
    if kill.action != "load":
        process.load(fleet.story)
    reason = disturb(process, fleet, kill)
    assert reason in {"", *REASONS[kill.victim]}
    assert_blobs_are_whole(process.directory / "cache")
    settle(process, fleet)
    wait_until_equal(lambda: (len(process.ranks()), process.get().load.used_slots), (2, 0))
    wait_until_equal(lambda: list_open(process), loaded)
    check(process, Moment.STARTED if kill.victim == "runtime" else Moment.NOTICED)
    if kill.action == "load":
        process.unload()
    ACTIONS[kill.action](process, fleet, kill.point, lambda: None)
    if process.ids():
        assert_serves(process, fleet)
        process.unload()
    wait_until_equal(lambda: (process.ranks(), list_memory_files(process)), ([], []))
