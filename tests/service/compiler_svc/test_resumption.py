"""Accepted compiles continue when the compiler stops and starts again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.longrunning.operations_pb2 import Operation

from compiler_svc.builds.job import BuildJob
from compiler_svc.compiles.queue import MAX_UNFINISHED_BUILDS
from compiler_svc.compiles.run import CompileRun
from compiler_svc.database.tables import OperationRow
from tests.servers.refusals import expect, read_refusal, refused
from tests.servers.running_compiler import response_of, serve_compiler
from tests.service.compiler_svc.test_bundle_leases import work_on


@asynccontextmanager
async def crash(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Keeps compilers that are closed meanwhile from leaving their compiles in good order, as SIGKILL would."""

    async def leave(self: CompileRun) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(CompileRun, "_leave", leave)
        yield


def change_row(home: Path, **values: object) -> None:
    """Changes the only operation."""
    work_on(home, lambda session: session.query(OperationRow).update(values))


@pytest.fixture
async def left(home: Path) -> tuple[Operation, BuildJob]:
    """An operation whose build a compiler had begun when it stopped, and the job."""
    async with serve_compiler(home) as (client, runner):
        operation = await client.compile()
        await client.reach_build(operation)
    return operation, runner.jobs[0]


async def test_a_stopped_compile_goes_on_and_succeeds_and_who_watches_again_sees_it(home: Path) -> None:
    async with serve_compiler(home) as (client, runner):
        operation = await client.compile(config_json='{"neuron_config": {"seq_len": 64}}', salt="s")
        await client.reach_build(operation)
        (job,) = runner.jobs
    assert runner.cancelled == 1
    assert runner.discarded == []
    async with serve_compiler(home) as (client, runner):
        watching = asyncio.create_task(client.watch(operation.name))
        await client.reach_build(operation)
        assert runner.jobs == [job]
        assert job.build_id in runner.retained
        runner.is_open.set()
        events = await watching
        assert [event.WhichOneof("event") for event in events] == ["progress"] * (len(events) - 1) + ["result"]
        assert events[-1].result == (response := response_of(await client.finish(operation)))
        assert response.version == 1
    assert runner.discarded == [job.build_id]


async def test_compiles_are_resumed_in_the_order_of_acceptance(home: Path) -> None:
    options = ("--max-builds", "1", "--max-waiting", "3")
    async with serve_compiler(home, *options) as (client, runner):
        accepted = [await client.compile(salt="0")]
        # Before the others, which could be quicker to the only place.
        await client.reach_build(accepted[0])
        accepted += [await client.compile(salt=str(number)) for number in range(1, 4)]
    async with serve_compiler(home, *options) as (client, runner):
        await refused(client.compile(salt="more"), "RESOURCE_EXHAUSTED", "COMPILE_QUEUE_FULL")
        runner.is_open.set()
        for operation in accepted:
            await client.finish(operation)
    assert [job.spec.salt for job in runner.jobs] == ["0", "1", "2", "3"]


async def test_equal_compiles_share_one_build_after_a_restart_too(home: Path) -> None:
    async with serve_compiler(home) as (client, runner):
        accepted = [await client.compile(name=name) for name in ("a", "b")]
        await client.reach_build(*accepted)
    async with serve_compiler(home) as (client, runner):
        await client.reach_build(*accepted)
        accepted.append(await client.compile(name="c"))
        runner.is_open.set()
        digests = {response_of(await client.finish(operation)).digest for operation in accepted}
    assert (len(runner.jobs), len(digests)) == (1, 1)


async def test_a_request_id_finds_its_operation_after_a_restart(home: Path) -> None:
    async with serve_compiler(home) as (client, _):
        operation = await client.compile(request_id="r")
    async with serve_compiler(home) as (client, runner):
        assert (await client.compile(request_id="r")).name == operation.name
        other = client.compile(request_id="r", name="other")
        await refused(other, "ALREADY_EXISTS", "REQUEST_ID_REUSED", request_id="r", operation=operation.name)
        runner.is_open.set()
        await client.finish(operation)
        (home / "models" / "tiny" / "model.safetensors").unlink()
        assert response_of(await client.compile(request_id="r")).version == 1
    assert len(runner.jobs) == 1


async def test_resumed_and_waiting_compiles_can_be_cancelled(home: Path) -> None:
    options = ("--max-builds", "1", "--max-waiting", "1")
    async with serve_compiler(home, *options) as (client, runner):
        accepted = [await client.compile(salt="a")]
        # Before the other one, which could be quicker to the only place.
        await client.reach_build(accepted[0])
        accepted.append(await client.compile(salt="b"))
    async with serve_compiler(home, *options) as (client, runner):
        await client.reach_build(accepted[0])
        for operation in reversed(accepted):
            await client.cancel(operation.name)
            await client.fail(operation, "CANCELLED", "COMPILE_CANCELLED")
    assert (len(runner.jobs), runner.cancelled) == (1, 1)


async def test_a_cancel_that_was_acknowledged_holds(home: Path, left: tuple[Operation, BuildJob]) -> None:
    change_row(home, is_cancelled=True)
    async with serve_compiler(home) as (client, runner):
        expect(read_refusal((await client.get(left[0].name)).error), "CANCELLED", "COMPILE_CANCELLED")
    assert runner.jobs == []


async def test_a_build_that_takes_the_compiler_down_is_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with crash(monkeypatch):
        async with serve_compiler(home) as (client, _):
            operation = await client.compile()
            await client.reach_build(operation)
        for _ in range(MAX_UNFINISHED_BUILDS - 1):
            async with serve_compiler(home) as (client, runner):
                await client.reach_build(operation)
    async with serve_compiler(home) as (client, runner):
        how = expect(read_refusal((await client.get(operation.name)).error), "UNAVAILABLE", "COMPILER_RESTARTED")
        assert how.metadata["operation"] == operation.name
        assert "3 builds of it ended with the compiler" in how.message
        assert runner.jobs == []
        runner.is_open.set()
        assert (await client.build()).version == 1


async def test_compiles_that_only_waited_are_not_counted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--max-builds", "1", "--max-waiting", "1")
    async with crash(monkeypatch):
        async with serve_compiler(home, *options) as (client, _):
            first = await client.compile(salt="a")
            await client.reach_build(first)
            second = await client.compile(salt="b")
        for _ in range(MAX_UNFINISHED_BUILDS - 1):
            async with serve_compiler(home, *options) as (client, _):
                await client.reach_build(first)
                await client.reach(second, "waiting for a free build slot")
    async with serve_compiler(home, *options) as (client, runner):
        assert (await client.get(first.name)).done
        runner.is_open.set()
        assert response_of(await client.finish(second)).version == 1


async def test_restarts_in_good_order_are_attempts_and_no_failures(home: Path) -> None:
    for _ in range(MAX_UNFINISHED_BUILDS + 1):
        async with serve_compiler(home) as (client, runner):
            operation = await client.compile(request_id="r")
            await client.reach_build(operation)
    attempts = work_on(home, lambda session: session.query(OperationRow).one().attempt)
    assert attempts == MAX_UNFINISHED_BUILDS + 1
    async with serve_compiler(home) as (client, runner):
        runner.is_open.set()
        assert response_of(await client.finish(operation)).version == 1


@pytest.mark.parametrize("spec", [None, b"{}", b'{"type": "CompileSpec"}'])
async def test_what_cannot_be_resumed_says_so(home: Path, left: tuple[Operation, BuildJob], spec: bytes | None) -> None:
    change_row(home, spec=spec)
    async with serve_compiler(home) as (client, _):
        expect(read_refusal((await client.get(left[0].name)).error), "UNAVAILABLE", "COMPILER_RESTARTED")


async def test_a_checkpoint_that_went_away_fails_by_name(home: Path, left: tuple[Operation, BuildJob]) -> None:
    (home / "models" / "tiny" / "model.safetensors").unlink()
    async with serve_compiler(home) as (client, _):
        await client.fail(left[0], "NOT_FOUND", "CHECKPOINT_NOT_FOUND")


async def test_what_a_build_of_other_inputs_left_is_discarded(home: Path, left: tuple[Operation, BuildJob]) -> None:
    operation, before = left
    (home / "models" / "tiny" / "generation_config.json").write_text("{}")
    async with serve_compiler(home) as (client, runner):
        await client.reach_build(operation)
        assert runner.jobs[0].build_id != before.build_id
        assert runner.discarded == [before.build_id]
