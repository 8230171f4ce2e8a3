"""Two weight sets for one set of executables, and what a runtime does with them while its processes are killed."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime

from runtime_svc.deployments.records import FILE_NAME
from tests.repository import ROOT
from tests.servers.answers import reason_of
from tests.servers.stack import Stack, token_request
from tests.system.conftest import TINY
from tests.system.runtime_process import PROMPT, SMALL_CONFIG, RuntimeProcess, send, wait_until

PIRATE: Final = ROOT / "examples/models/kiln-tiny-pirate"
ABORT: Final = runtime.IN_FLIGHT_POLICY_ABORT
#: Where deployments are loaded: not where a runtime would put them itself.
PLACE: Final[dict[str, Any]] = {"cores": [3, 1]}
#: Twice as many streams as the deployment has slots.
NUM_SLOTS: Final = 4
NUM_STREAMS: Final = 2 * NUM_SLOTS
#: Points of a call.
SENT: Final = "sent"
BEGUN: Final = "begun"


@dataclass(frozen=True)
class Fleet:
    """A compiler with two weight sets for one set of executables, at one degree."""

    story: str
    pirate: str
    #: What each generates, by the digest of its bundle: a mixture of both would show.
    expected: dict[str, list[int]]

    def other(self, digest: str) -> str:
        return self.pirate if digest == self.story else self.story


def provide_fleet(stack: Stack, process: RuntimeProcess) -> Fleet:
    """Compiles both at degree 2, so that a mixture over ranks would show too, and generates with each on a runtime."""
    config = {"neuron_config": {**SMALL_CONFIG["neuron_config"], "tp_degree": 2}}
    expected = {}
    for name, model in (("crash-story", TINY), ("crash-pirate", PIRATE)):
        stack.provide(name, model, config)
        digest = process.load(name, name).roles[0].bundle_digest
        expected[digest] = process.generate(deployment_id=name)
        process.unload(name)
    story, pirate = expected
    assert expected[story] != expected[pirate]
    return Fleet(story, pirate, expected)


def assert_serves(process: RuntimeProcess, fleet: Fleet) -> tuple[str, int]:
    """The tokens are those of the weights that the deployment says it has; returns their digest and epoch."""
    role = process.get().roles[0]
    assert process.generate() == fleet.expected[role.weights_digest]
    return role.weights_digest, role.weight_epoch


#: Calls `reached` at the point of the matrix, and goes on; returns what the runtime says of new weights, if it does.
Action = Callable[[RuntimeProcess, Fleet, str, Callable[[], None]], runtime.LoadWeightsResult | None]


def run_through(events: Any, stage: str, reached: Callable[[], None]) -> Any:
    """Takes the events of a load, which has to have the stage; returns the last one."""
    wanted = runtime.LoadProgress.Stage.Value(f"STAGE_{stage}")
    event = next(event for event in events if event.progress.stage == wanted)
    reached()
    for event in events:  # noqa: B007 - the last one is returned
        pass
    return event


def load(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    request = runtime.LoadBundleRequest(ref=fleet.story, deployment_id="d", **PLACE)
    run_through(process.control.LoadBundle(request), point, reached)


def swap(
    process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]
) -> runtime.LoadWeightsResult | None:
    other = fleet.other(process.get().roles[0].weights_digest)
    events = process.control.LoadWeights(runtime.LoadWeightsRequest(deployment_id="d", ref=other))
    result: runtime.LoadWeightsResult = run_through(events, point, reached).result
    return result


def swap_unrecorded(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    """Swaps as often as the point says, then once more, up to where the runtime has swapped and cannot record it."""
    for _ in range(int(point)):
        process.load_weights(fleet.other(process.get().roles[0].weights_digest))
    other = fleet.other(process.get().roles[0].weights_digest)
    with holding_records(process):
        answer = process.control.LoadWeights(runtime.LoadWeightsRequest(deployment_id="d", ref=other))
        wait_until(lambda: process.get().roles[0].weights_digest == other)
        reached()
    for _ in answer:
        pass


@contextmanager
def holding_records(process: RuntimeProcess) -> Iterator[None]:
    """Keeps the runtime from writing its records."""
    with closing(sqlite3.connect(process.directory / "state" / FILE_NAME, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def swap_and_rest(
    process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]
) -> runtime.LoadWeightsResult | None:
    result = process.load_weights(fleet.other(process.get().roles[0].weights_digest))
    reached()
    return result


def generate(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    """Streams to their ends, or to the first one's error.

    Those that hold a slot when a rank is lost end with one error and one terminal event, and no others do.
    """

    def read(request: generation.GenerateRequest) -> tuple[list[Any], Exception | None]:
        events, seen = [], 0
        try:
            for event in process.generation.Generate(request, timeout=120):
                events.append(event)
                seen += len(event.delta.tokens)
                if seen >= int(point):
                    reached()
        except (grpc.RpcError, ValueError) as error:
            return events, error
        return events, None

    requests = [token_request("d", [number + 3], 150, temperature=0.0) for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        outcomes = list(pool.map(read, requests))
    assert all(events[-1].HasField("finished") for events, error in outcomes if error is None)
    failed = [(events, error) for events, error in outcomes if error is not None]
    if not failed:
        return
    if process.lives:
        assert len(failed) <= NUM_SLOTS, "those that held a slot, and no others"
        for events, error in failed:
            assert isinstance(error, grpc.RpcError)
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert reason_of(error) == reason_of(failed[0][1])
            assert not events or [event.HasField("finished") for event in events].count(True) == 1
    raise failed[0][1]


def tokenize(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    request = generation.TokenizeRequest(deployment_id="d", text="Once upon a time " * 2000)
    meet(process, process.generation.Tokenize, request, point, reached, held="kiln-text")


def meet(
    process: RuntimeProcess, method: Any, request: Any, point: str, reached: Callable[[], None], *, held: str
) -> None:
    """Calls `reached` when a call has been sent, or has begun and cannot end because a process is stopped."""
    stopped = process.find(held)[:1] if point == BEGUN else []
    for one in stopped:
        send(one, signal.SIGSTOP)
    answer = method.future(request, timeout=60)
    if point == BEGUN:
        # A server begins calls of one channel in their order.
        process.ids()
    reached()
    for one in stopped:
        send(one, signal.SIGCONT)
    answer.result()


def capture(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    request = token_request("d", PROMPT, 150, temperature=0.0)
    request.output.capture_inputs.num_steps = 100
    seen = 0
    for event in process.generation.Generate(request, timeout=60):
        seen += len(event.delta.tokens)
        if seen >= int(point):
            reached()


def reset(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    scope = runtime.DeploymentScope()
    request = runtime.ResetKVCacheRequest(deployment_id="d", deployment=scope, in_flight_policy=ABORT)
    meet(process, process.control.ResetKVCache, request, point, reached, held="kiln-rank-0")


def unload(process: RuntimeProcess, fleet: Fleet, point: str, reached: Callable[[], None]) -> None:
    request = runtime.UnloadBundleRequest(deployment_id="d", in_flight_policy=ABORT)
    meet(process, process.control.UnloadBundle, request, point, reached, held="kiln-rank-0")


ACTIONS: Final[Mapping[str, Action]] = {
    "load": load,
    "swap": swap,
    "swap unrecorded": swap_unrecorded,
    "swap and rest": swap_and_rest,
    "generate": generate,
    "tokenize": tokenize,
    "capture": capture,
    "reset": reset,
    "unload": unload,
}
