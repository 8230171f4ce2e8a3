"""PlanCompile with `check_graphs`, over gRPC, with a double of torch-xla in the interpreter for Neuron."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from kiln.compiler.v1 import compiler_pb2 as pb

from compiler_svc.planning.pool import PlanningPool, make_forkserver
from targets.neuron import NEURON_PYTHON
from tests.hang_guard import HANG_S
from tests.neuron.neuronx_cc import find_waiting, write_waiting_program
from tests.neuron.standin import VERSIONS, make_interpreter
from tests.servers.compiler_process import run_compiler, wait_until_gone
from tests.servers.refusals import expect, refusal, refused
from tests.servers.running_compiler import Client, serve_compiler

CONFIG = {
    "seq_len": 32,
    "batch_size": 2,
    "enable_bucketing": True,
    "context_encoding_buckets": [8],
    "token_generation_buckets": [32],
}
TAGS = ["context_encoding_8", "token_generation_32"]
#: Of graphs for the cpu, which the double traces: XLA's have floats in their place.
SAMPLED = {"on_device_sampling_config": {"dynamic": True}}
MIB = 1 << 20

Order = Callable[[str], None]
Serve = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    """Says what torch-xla does when the first tensor is made, as a program."""
    path = tmp_path / "torch_xla_program.py"
    monkeypatch.setenv("NEURON_TEST_TORCH_XLA", str(path))

    def order(program: str) -> None:
        path.write_text(program)

    return order


@pytest.fixture
def waiting(tmp_path: Path, order: Order) -> Path:
    """Has torch-xla wait for ever; returns the folder in which its processes announce themselves."""
    announcements = tmp_path / "waiting"
    order(write_waiting_program(announcements))
    return announcements


@pytest.fixture
def serve(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serves a compiler whose interpreter for Neuron has the double of torch-xla, or other packages."""

    @asynccontextmanager
    async def serve(*options: str, versions: Mapping[str, str] = VERSIONS) -> AsyncIterator[Client]:
        monkeypatch.setenv(NEURON_PYTHON.variable, str(make_interpreter(tmp_path, versions, has_xla=True)))
        # Of its own: it hands the environment of its start on.
        with closing(make_forkserver()) as forkserver:
            async with serve_compiler(home, *options, planning=PlanningPool(forkserver)) as (client, _):
                yield client

    return serve


def plan(client: Client, config: Mapping[str, Any] = CONFIG, **fields: Any) -> Any:
    trn2 = {"target": pb.Target(kind=pb.Target.KIND_TRN2)}
    return client.plan(neuron_config=config, timeout=3 * HANG_S, **(trn2 | fields))


@pytest.mark.slow
async def test_findings_are_part_of_the_plan(serve: Serve) -> None:
    async with serve() as client:
        sampled = await plan(client, CONFIG | SAMPLED, check_graphs=True)
        assert sampled.fits
        assert sampled.graph_check.num_graphs == 2
        assert {(one.tag, one.submodel, *one.bucket.tokens) for one in sampled.graph_check.findings} == {
            (TAGS[0], "context_encoding", 8),
            (TAGS[1], "token_generation", 32),
        }
        assert sampled.graph_check.num_findings == len(sampled.graph_check.findings)
        finding = next(one for one in sampled.graph_check.findings if one.code == "NCC_EVRF013")
        assert finding.operation.startswith("sort ")
        assert finding.accepted == "floating-point keys"
        assert finding.source.startswith("execution/")
        assert not any("has not run" in warning for warning in sampled.warnings)

        unchecked = await plan(client, CONFIG | SAMPLED)
        assert not unchecked.HasField("graph_check")
        assert any("has not run" in warning for warning in unchecked.warnings)

        planned = await plan(client, CONFIG | {"tp_degree": 2}, check_graphs=True)
        assert planned.graph_check == pb.GraphCheck(num_graphs=2), "no findings"
        assert [one.tag for one in planned.executables] == TAGS

        call = plan(client, CONFIG | {"k_cache_transposed": True}, check_graphs=True)
        await refused(call, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", "neuron_config.k_cache_transposed")


@pytest.mark.slow
async def test_the_memory_of_a_core_is_that_of_the_plan(serve: Serve) -> None:
    async with serve() as client:
        small = await plan(client, CONFIG | {"batch_size": 256}, core_memory_bytes=MIB, check_graphs=True)
        assert [(one.tag, one.code) for one in small.graph_check.findings] == [(tag, "NCC_EVRF009") for tag in TAGS]


async def test_what_a_host_cannot_check(serve: Serve) -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != "torch-xla"}
    async with serve(versions=versions) as client:
        call = plan(client, target={"kind": "KIND_CPU"}, check_graphs=True)
        how = await refused(call, "INVALID_ARGUMENT", "CONFIG_INVALID")
        assert "trn2" in how.fields["check_graphs"]

        how = expect(await refusal(plan(client, check_graphs=True)), "FAILED_PRECONDITION", "NEURON_TOOLCHAIN_MISSING")
        assert how.metadata["missing"] == "torch-xla"
        assert "install kiln-neuron-lowering" in how.message


async def test_a_cancelled_call_ends_the_interpreter(serve: Serve, home: Path, waiting: Path) -> None:
    async with serve() as client:
        call = plan(client, check_graphs=True)
        found = await wait_for_interpreter(waiting)
        assert (await plan(client)).executables, "other plans do not wait for it"
        assert list_files(home) != []
        call.cancel()
        await wait_until_gone(*found)
        async with asyncio.timeout(HANG_S):
            while list_files(home):  # noqa: ASYNC110 - what the service removes
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_interpreter_ends_with_a_compiler_that_is_killed(home: Path, tmp_path: Path, waiting: Path) -> None:
    interpreter = make_interpreter(tmp_path, has_xla=True)
    async with run_compiler(home, "--neuron-python", str(interpreter)) as compiler:
        call = plan(compiler.client, check_graphs=True)
        found = await wait_for_interpreter(waiting)
        compiler.process.send_signal(signal.SIGKILL)
        await wait_until_gone(*found)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    assert list_files(home) != []
    async with run_compiler(home):
        assert list_files(home) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        ("import signal; signal.pause()", ["--lowering-timeout", "5"], "DEADLINE_EXCEEDED/PLAN_TIMED_OUT"),
        ("bytearray(1 << 33)", ["--lowering-memory", "4GiB"], "RESOURCE_EXHAUSTED/PLAN_MEMORY_EXCEEDED"),
        ("raise ValueError('no such operator')", [], "INTERNAL/NEURON_TRACE_FAILED"),
        ("import os; os._exit(3)", [], "INTERNAL/PLAN_FAILED"),
    ],
    ids=["time", "memory", "trace", "fault"],
)
async def test_a_limit_or_a_failure_is_named(
    serve: Serve, order: Order, program: str, options: list[str], expected: str
) -> None:
    order(program)
    async with serve(*options) as client:
        refused = await refusal(plan(client, check_graphs=True))
        assert f"{refused.code.name}/{refused.reason}" == expected
        assert "/" not in refused.message, "no path of the host"


def list_files(home: Path) -> list[Path]:
    """What plans that check graphs keep in the store, or have left there."""
    return list((home / "store/jobs").glob("plan-*"))


async def wait_for_interpreter(announcements: Path) -> list[psutil.Process]:
    async with asyncio.timeout(HANG_S):
        while not (found := find_waiting(announcements)):  # noqa: ASYNC110 - a process in another interpreter
            await asyncio.sleep(0.05)
    return found
