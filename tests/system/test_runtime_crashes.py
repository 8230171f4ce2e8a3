"""SIGKILL for the runtime and for its ranks: a restart brings everything back whole, or not at all.

One stage of each action; `tests/system/kills` has the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.servers.stack import Stack, token_request, tokens_of
from tests.system.fleet import Fleet, assert_serves, provide_fleet, run_until
from tests.system.runtime_process import (
    PROMPT,
    RuntimeProcess,
    State,
    assert_blobs_are_whole,
    kill_rank,
    reason_of,
    run_runtime,
    wait_until,
)


@pytest.fixture(scope="module")
def lasting(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    """A runtime that fetches every blob into its own cache, and is not killed."""
    with run_runtime(stack.compiler, tmp_path_factory.mktemp("lasting")) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(stack: Stack, lasting: RuntimeProcess) -> Fleet:
    return provide_fleet(stack, lasting)


@pytest.fixture
def process(fleet: Fleet, tmp_path: Path) -> Iterator[RuntimeProcess]:
    """A runtime to be killed, with a cache of its own."""
    with run_runtime(fleet.compiler, tmp_path) as started:
        yield started


@pytest.fixture
def survivor(lasting: RuntimeProcess) -> Iterator[RuntimeProcess]:
    """A runtime whose ranks are killed; it has no deployments."""
    assert lasting.ids() == []
    yield lasting
    for deployment_id in lasting.ids():
        lasting.unload(deployment_id)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["MAP"])
def test_runtime_killed_during_a_load(process: RuntimeProcess, fleet: Fleet, tmp_path: Path, stage: str) -> None:
    request = runtime.LoadBundleRequest(ref=fleet.story, deployment_id="d", cores=[3, 1], threads_per_core=2)
    run_until(process.control.LoadBundle(request), stage)
    process.kill()
    assert_blobs_are_whole(tmp_path / "cache")
    process.start()
    deployment = process.wait_for("READY")
    assert (list(deployment.cores), deployment.threads_per_core) == ([3, 1], 2)
    assert assert_serves(process, fleet) == fleet.story
    assert len(process.ranks()) == 2
    assert assert_blobs_are_whole(tmp_path / "cache") > 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["SWAP"])
def test_runtime_killed_while_weights_change(process: RuntimeProcess, fleet: Fleet, tmp_path: Path, stage: str) -> None:
    process.load(fleet.story)
    run_until(process.control.LoadWeights(runtime.LoadWeightsRequest(deployment_id="d", ref=fleet.pirate)), stage)
    process.kill()
    assert_blobs_are_whole(tmp_path / "cache")
    process.start()
    role = process.wait_for("READY").roles[0]
    assert (role.weights_digest, role.weight_epoch) in {(fleet.story, 1), (fleet.pirate, 2)}
    assert assert_serves(process, fleet) == role.weights_digest
    assert process.load_weights(fleet.pirate).weight_epoch == role.weight_epoch + 1
    process.kill()
    process.start()
    assert process.wait_for("READY").roles[0].weight_epoch == role.weight_epoch + 1
    assert assert_serves(process, fleet) == fleet.pirate


@pytest.mark.parametrize("victim", [0])
def test_rank_killed_during_generation(survivor: RuntimeProcess, fleet: Fleet, victim: int) -> None:
    survivor.load(fleet.story)

    def collect(request: generation.GenerateRequest) -> tuple[list[Any], grpc.RpcError | None]:
        events: list[Any] = []
        try:
            events.extend(survivor.generation.Generate(request, timeout=60))
        except grpc.RpcError as error:
            return events, error
        return events, None

    requests = [token_request("d", [index + 3], 240, temperature=0.0) for index in range(8)]
    with ThreadPoolExecutor(len(requests)) as pool:
        streams = [pool.submit(collect, request) for request in requests]
        wait_until(lambda: survivor.get().load.used_slots == 4)
        kill_rank(survivor.ranks()[victim])
        outcomes = [stream.result() for stream in streams]
    failed = [(events, error) for events, error in outcomes if error is not None]
    assert 1 <= len(failed) <= 4, "those that held a slot, and no others"
    for events, error in failed:
        assert error is not None
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "RANK_DIED")
        if events:
            assert [event.HasField("finished") for event in events].count(True) == 1
    assert all(events[-1].HasField("finished") for events, error in outcomes if error is None)
    assert assert_serves(survivor, fleet) == fleet.story
    assert survivor.get().load.used_slots == 0
    assert len(survivor.ranks()) == 2


@pytest.mark.slow
def test_rank_stopped_and_a_whole_runtime_paused(fleet: Fleet, tmp_path: Path) -> None:
    with run_runtime(fleet.compiler, tmp_path, "--min-step-timeout=1") as process:
        process.load(fleet.story)

        # As `docker pause` does: nothing hangs.
        stream = process.generation.Generate(token_request("d", PROMPT, 200, temperature=0.0), timeout=60)
        events = [next(stream)]
        ranks = process.ranks()
        everyone = [*process.processes(), *ranks]
        for one in everyone:
            one.suspend()
        time.sleep(3)
        for one in everyone:
            one.resume()
        events += stream
        assert tokens_of(events)[:20] == fleet.expected[fleet.story]
        assert process.ranks() == ranks

        stream = process.generation.Generate(token_request("d", [9], 240, temperature=0.0), timeout=60)
        next(stream)
        ranks[1].suspend()
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "RANK_HUNG")
        assert "rank 1 hung" in caught.value.details()
        process.wait_for("READY")
        assert assert_serves(process, fleet) == fleet.story
        assert not set(process.ranks()) & set(ranks)


@pytest.mark.parametrize("stage", ["SWAP"])
def test_rank_killed_while_weights_change(survivor: RuntimeProcess, fleet: Fleet, stage: str) -> None:
    survivor.load(fleet.story)
    events = survivor.control.LoadWeights(runtime.LoadWeightsRequest(deployment_id="d", ref=fleet.pirate))
    run_until(events, stage)
    victim = survivor.ranks()[1]
    kill_rank(victim)
    result, error = None, None
    try:
        result = [*events][-1].result
    except grpc.RpcError as caught:
        error = caught
    assert error is None or reason_of(error) in {"RANK_DIED", "DEPLOYMENT_NOT_READY"}
    # The swap may be over before the death is noticed.
    wait_until(lambda: victim not in (ranks := survivor.ranks()) and len(ranks) == 2)
    role = survivor.wait_for("READY").roles[0]
    assert (role.weights_digest, role.weight_epoch) in {(fleet.story, 1), (fleet.pirate, 2)}
    assert result is None or role.weight_epoch == result.weight_epoch == 2
    assert assert_serves(survivor, fleet) == role.weights_digest
    assert survivor.load_weights(fleet.pirate).weight_epoch == role.weight_epoch + 1
    assert assert_serves(survivor, fleet) == fleet.pirate


def test_rank_killed_while_it_loads(survivor: RuntimeProcess, fleet: Fleet) -> None:
    events = survivor.control.LoadBundle(runtime.LoadBundleRequest(ref=fleet.story, deployment_id="d"))
    run_until(events, "MAP")
    wait_until(lambda: len(survivor.ranks()) == 2)
    victim, other = survivor.ranks()
    # A load of so small a model may end before the kill, but not without this rank.
    other.suspend()
    kill_rank(victim)
    with pytest.raises(grpc.RpcError) as caught:
        list(events)
    assert reason_of(caught.value) == "RANK_DIED"
    assert survivor.get().state == State.STATE_FAILED
    assert survivor.ranks() == []
    assert survivor.control.GetServerInfo(runtime.GetServerInfoRequest()).free_cores == 4
    survivor.load(fleet.story)
    assert assert_serves(survivor, fleet) == fleet.story


@pytest.mark.slow
def test_runtime_killed_at_any_time(process: RuntimeProcess, fleet: Fleet, tmp_path: Path) -> None:
    """Loads of weights without end, and a kill after ever longer times: never a mixture, never a lost deployment."""
    process.load(fleet.story)
    last_epoch = 1
    for round_ in range(12):
        done = threading.Event()

        def load_on(done: threading.Event = done) -> None:
            while not done.is_set():
                for digest in (fleet.pirate, fleet.story):
                    try:
                        process.load_weights(digest)
                    except (grpc.RpcError, ValueError):
                        return

        loader = threading.Thread(target=load_on)
        loader.start()
        done.wait(0.05 + 0.037 * round_)
        process.kill()
        done.set()
        loader.join()
        assert_blobs_are_whole(tmp_path / "cache")
        process.start()
        epoch = process.wait_for("READY").roles[0].weight_epoch
        assert epoch >= last_epoch, "an epoch came back"
        assert_serves(process, fleet)
        last_epoch = epoch
