"""The server as a whole: health under load, drain, command line."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2, runtime_pb2_grpc

from execution.step import Step, StepResult
from tests.hang_guard import HANG_S
from tests.ranks.fakes import FakeRanks, expected_tokens
from tests.repository import ROOT
from tests.running_time import running_time
from tests.servers.refusals import read_refusal, refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of

#: Computes until its standard input is closed.
BURN = """
import select, sys
while not select.select([sys.stdin], [], [], 0)[0]:
    pass
"""
#: Health checks that are answered during one step.
NUM_CHECKS = 200


async def test_health_answers_while_a_step_runs(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step burns a processor in another process, as a rank does, until all checks have been answered."""
    run_at_once, num_answered = FakeRanks._run, asyncio.Semaphore(0)

    async def run(ranks: FakeRanks, step: Step, before: asyncio.Future[StepResult] | None) -> StepResult:
        burning = await asyncio.create_subprocess_exec(sys.executable, "-c", BURN, stdin=asyncio.subprocess.PIPE)
        for _ in range(NUM_CHECKS):
            await num_answered.acquire()
        assert burning.returncode is None
        await burning.communicate(b"")
        return await run_at_once(ranks, step, before)

    monkeypatch.setattr(FakeRanks, "_run", run)
    await served.deploy()
    request = asyncio.create_task(served.generate([5], 2))
    latencies_s = []
    async with asyncio.timeout(2 * HANG_S):
        while not request.done():
            with running_time() as taken:
                await served.check_health()
            latencies_s.append(taken.s)
            num_answered.release()
    assert tokens_of(await request) == expected_tokens([5], 2)
    assert len(latencies_s) >= 2 * NUM_CHECKS
    assert statistics.median(latencies_s) < 0.05


async def test_long_prompt_does_not_stop_the_front(served: Runtime) -> None:
    await served.deploy(prompt_buckets=(1 << 19,), token_buckets=(1 << 19,))
    text = "Once upon a time there was " * 30_000
    request = asyncio.ensure_future(
        served.generation.Tokenize(generation.TokenizeRequest(deployment_id="d", text=text))
    )
    start_s, latencies_s = time.monotonic(), []
    while not request.done():
        before_s = time.perf_counter()
        await served.check_health()
        latencies_s.append(time.perf_counter() - before_s)
    assert time.monotonic() - start_s > 0.2, "too short to prove anything"
    # Building and serializing a million ids is the server's and this client's own.
    assert statistics.median(latencies_s) < 0.05


async def test_drain_lets_streams_finish(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, f"--drain-timeout={2 * HANG_S}") as served:
        await served.deploy()
        served.ranks.step_s = 0.01
        call = served.generation.Generate(token_request([5], 30))
        await anext(aiter(call))
        drain = asyncio.create_task(served.server.drain())
        assert tokens_of([event async for event in call]) == expected_tokens([5], 30)
        with running_time() as taken:
            await asyncio.wait_for(drain, HANG_S)
        assert taken.s < 2
        assert served.ranks.is_closed


async def test_drain_ends_streams_that_take_too_long(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--drain-timeout=1.5") as served:
        await served.deploy(num_slots=1)
        served.ranks.step_s = 0.1
        running = served.generation.Generate(token_request([5], 60))
        waiting = served.generation.Generate(token_request([5], 60))
        for call in (running, waiting):
            await anext(aiter(call))
        drain = asyncio.create_task(served.server.drain())
        for call in (running, waiting):
            events = (await refused(call, "UNAVAILABLE", "SHUTTING_DOWN")).events
            assert events[-1].finished.reason == generation.FINISH_REASON_ERROR
            assert read_refusal(events[-1].finished.status).reason == "SHUTTING_DOWN"
        await asyncio.wait_for(drain, HANG_S)
        with pytest.raises(grpc.aio.AioRpcError):
            await served.generate([5])


def start_process(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runtime_svc", "--compiler=127.0.0.1:1", f"--cache={tmp_path}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_process_says_when_it_is_ready_and_ends_on_sigterm(tmp_path: Path) -> None:
    process = start_process(tmp_path, "--address=127.0.0.1:0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready address=127.0.0.1:"), process.stderr.read() if process.stderr else ""
        with grpc.insecure_channel(line.strip().removeprefix("ready address=")) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_process_that_cannot_serve_says_why(tmp_path: Path) -> None:
    process = start_process(tmp_path, "--address=0.0.0.0:0")
    _, log = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "PLAINTEXT_REFUSED" in log


def test_everything_that_a_process_says_is_an_event(tmp_path: Path) -> None:
    """Also gRPC's own line about the port that is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start_process(tmp_path, f"--address={address}", f"--log-file={tmp_path / 'runtime.log'}")
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    events = [json.loads(line) for line in (tmp_path / "runtime.log").read_text().splitlines()]
    assert events[-1]["reason"] == "ADDRESS_UNAVAILABLE"
    assert any(".cc:" in event.get("source", "") for event in events)
    # A person who starts it by hand does not look into the file first.
    (shown,) = map(json.loads, errors.splitlines())
    assert shown["reason"] == "ADDRESS_UNAVAILABLE"


def test_process_takes_its_options_from_environment_and_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILN_RUNTIME_ADDRESS", "127.0.0.1:0")
    monkeypatch.setenv("KILN_RUNTIME_CONFIG", str(tmp_path / "runtime.yaml"))
    (tmp_path / "runtime.yaml").write_text("cores: 3\nthreds-per-core: 2\n")
    process = start_process(tmp_path)
    _, log = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "runtime.yaml:2: got 'threds-per-core'; accepted: threads-per-core, if that is meant" in log
    (tmp_path / "runtime.yaml").write_text("cores: 3\nthreads-per-core: 2\n")
    process = start_process(tmp_path)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip().removeprefix("ready address=")
        with grpc.insecure_channel(address) as channel:
            info = runtime_pb2_grpc.RuntimeServiceStub(channel).GetServerInfo(runtime_pb2.GetServerInfoRequest())
        assert info.total_cores == 3
    finally:
        process.kill()
        process.communicate()
