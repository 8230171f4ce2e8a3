"""SIGKILL of the compiler at every stage of compile and publish: the store holds whole bundles, operations continue."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from tests.checkpoints.random_weights import write_checkpoint
from tests.processes import living_descendants, name_of
from tests.servers.compiler_process import CompilerProcess, run_compiler, wait_until_gone
from tests.servers.running_compiler import response_of, serve_compiler
from tests.servers.stores import check_store
from tests.system.compiler_svc.builds.crash_points import RESULT, STAGED, Found, Message, blobs, listed, lowered

Point = Message | Found

CONFIG = {
    "neuron_config": {
        "seq_len": 16,
        "max_context_length": 8,
        "enable_bucketing": True,
        "context_encoding_buckets": [4, 8],
        "token_generation_buckets": [16],
    }
}

#: Two deaths of each compile; the third attempt is to succeed.
DEATHS = [(Message("exporting the graphs"), listed(1))]
MORE_DEATHS = [
    (Message("starting the build"), blobs(2)),
    (blobs(4), RESULT),
    (Message("hashing the checkpoint"), Message("writing the rank weight shards")),
    (Message("starting the build", 0.5), Message("comparing logits with the reference")),
    (Message("starting the build", 1.5), Message("publishing")),
    (Message("exporting the graphs", 0.3), lowered(1)),
    (Message("compiling the graphs"), Message("publishing", 0.005)),
    (lowered(3), STAGED),
    (blobs(1), blobs(3)),
    (blobs(5), blobs(6)),
    (blobs(7), blobs(8)),
    (blobs(9), listed(2)),
    (listed(3), blobs(11)),
    (blobs(13), listed(5)),
    (Message("comparing logits with the reference", 0.5), Message("comparing logits with the reference", 1.5)),
]


def name_deaths(deaths: Sequence[Point]) -> str:
    return ", ".join(map(str, deaths))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of a bundle whose compile is not interrupted."""
    home = tmp_path_factory.mktemp("undisturbed")
    write_checkpoint(home / "models" / "tiny")

    async def build() -> str:
        async with run_compiler(home) as compiler:
            return response_of(await compiler.client.finish(await start(compiler))).digest

    return asyncio.run(build())


async def start(compiler: CompilerProcess) -> operations_pb2.Operation:
    return await compiler.client.compile(
        config_json=json.dumps(CONFIG), optimization_level=pb.OPTIMIZATION_LEVEL_O0, request_id="r"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("deaths", DEATHS, ids=name_deaths)
async def test_two_deaths(home: Path, expected: str, deaths: tuple[Point, ...]) -> None:
    await survive(home, expected, deaths)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("deaths", MORE_DEATHS, ids=name_deaths)
async def test_two_deaths_elsewhere(home: Path, expected: str, deaths: tuple[Point, ...]) -> None:
    await survive(home, expected, deaths)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
async def test_two_deaths_anywhere(home: Path, expected: str, seed: int) -> None:
    delays_s = [random.Random(seed * 2 + one).uniform(0, 8) for one in range(2)]
    await survive(home, expected, [Message("starting the build", delay_s) for delay_s in delays_s])


async def survive(home: Path, expected: str, deaths: Sequence[Point]) -> None:
    """Kills the compiler of one compile at each point, then lets it come to its end."""
    first = await publish_something(home)
    for point in deaths:
        async with run_compiler(home) as compiler:
            operation = await start(compiler)
            await point.wait(compiler, home, operation.name)
            await kill(compiler)
        check_store(home)
    async with run_compiler(home) as compiler:
        response = response_of(await compiler.client.finish(await start(compiler)))
        assert (response.name, response.version, response.digest) == ("tiny", 2, expected)
        assert await digest_of(compiler, "tiny@prod") == await digest_of(compiler, "tiny:v1") == first
        assert await digest_of(compiler, "tiny") == await digest_of(compiler, "tiny:v2") == expected
        listed = await compiler.client.operations.ListOperations(operations_pb2.ListOperationsRequest())
        assert [one.WhichOneof("result") for one in listed.operations] == ["response"] * 2
        await compiler.client.bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest())
    assert check_store(home) == {first, expected}
    for leftovers in ("jobs", ".kiln/staging", ".kiln/pins"):
        assert list((home / "store" / leftovers).iterdir()) == []


async def publish_something(home: Path) -> str:
    """Gives the store a version with an alias, which is to stay as it is."""
    async with serve_compiler(home) as (client, runner):
        runner.is_open.set()
        digest = response_of(await client.finish(await client.compile())).digest
        await client.bundles.SetAlias(bundle_pb2.SetAliasRequest(ref="tiny:v1", alias="prod"))
        return digest


async def kill(compiler: CompilerProcess) -> None:
    """Ends the compiler at once, and waits until its builds have followed."""
    builds = [child for build in compiler.builds() for child in (build, *living_descendants(build.pid))]
    os.kill(compiler.process.pid, signal.SIGKILL)
    await wait_until_gone(*builds)


async def digest_of(compiler: CompilerProcess, ref: str) -> str:
    response = await compiler.client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=ref))
    return str(response.bundle.digest)


async def reach_lowerings(compiler: CompilerProcess) -> list[psutil.Process]:
    while not (processes := compiler.lowerings()):  # noqa: ASYNC110 - processes announce no start
        await asyncio.sleep(0.05)
    return processes


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.timeout(900)
async def test_what_was_compiled_before_a_death_is_not_compiled_again(home: Path) -> None:
    async with run_compiler(home, "--lowerings", "1") as compiler:
        operation = await compiler.client.compile(config_json=json.dumps(CONFIG))
        await lowered(1).wait(compiler, home, operation.name)
        processes = await reach_lowerings(compiler)
        await kill(compiler)
        await wait_until_gone(*processes)
    (record,) = (home / "store" / "jobs").glob("*/lowered/*.json")
    before = record.read_bytes()
    async with run_compiler(home, "--lowerings", "1") as compiler:
        await compiler.client.reach(operation, "context_encoding_4 was compiled before the restart")
        assert record.read_bytes() == before
        response = response_of(await compiler.client.finish(operation))
    assert response.cache == pb.CACHE_RESULT_MISS
    assert response.executables[0].duration.ToTimedelta().total_seconds() == pytest.approx(
        json.loads(before)["duration_s"]
    )


@pytest.mark.slow
@pytest.mark.toolchain
async def test_cancelling_leaves_no_process_of_a_lowering(home: Path) -> None:
    async with run_compiler(home, "--lowerings", "2") as compiler:
        operation = await compiler.client.compile(config_json=json.dumps(CONFIG))
        processes = [*await reach_lowerings(compiler), *compiler.builds()]
        await compiler.client.cancel(operation.name)
        await compiler.client.finish(operation)
        # The forkserver ends what it forked for a build as soon as it sees that the build has gone.
        await wait_until_gone(*processes, *compiler.lowerings())
        left = living_descendants(compiler.process.pid)
        assert sorted(map(name_of, left)) == ["kiln-builds", "kiln-lowerings", "kiln-plans"]
        assert list((home / "store" / "jobs").iterdir()) == []
