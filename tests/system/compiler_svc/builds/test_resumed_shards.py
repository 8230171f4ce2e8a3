"""SIGKILL of a build, and of the compiler, while shards are written: the next attempt writes the other ranks only."""

import asyncio
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.numpy import save_file

from bundle.layout import Layout
from compiler_svc.builds.finished_shards import FOLDER, list_finished_shards
from tests.checkpoints.random_weights import CONFIG, random_tensors, write_checkpoint
from tests.servers.compiler_process import CompilerProcess, run_compiler
from tests.servers.running_compiler import read_refusal, response_of
from tests.servers.stores import check_store
from tests.system.compiler_svc.builds.crash_points import Message, count_staged
from tests.system.compiler_svc.builds.test_crashes import kill

RANKS = 4
#: Large enough that a pass over it takes a while.
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def _two_processors() -> Iterator[None]:
    """Two passes of two ranks, on any machine: a pass writes at least as many as there are processors."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:2])
    yield
    os.sched_setaffinity(0, allowed)


def write_model(home: Path) -> None:
    model = write_checkpoint(home / "models" / "large", **SHAPE)
    tensors = random_tensors(CONFIG | SHAPE, 0)
    save_file({name: tensor * 0.05 for name, tensor in tensors.items()}, model / "model.safetensors")


async def start(
    compiler: CompilerProcess, *, is_aside: bool, skip_cache_lookup: bool = False
) -> operations_pb2.Operation:
    config = {"seq_len": 16, "max_context_length": 8, "tp_degree": RANKS, "save_sharded_checkpoint": not is_aside}
    return await compiler.client.compile(
        name="large",
        model="large",
        config_json=json.dumps({"neuron_config": config}),
        optimization_level=pb.OPTIMIZATION_LEVEL_O0,
        skip_cache_lookup=skip_cache_lookup,
    )


def list_records(home: Path) -> dict[str, tuple[int, int]]:
    """The records of finished shards: by name, which file it is and when it was written."""
    records = (home / "store" / "jobs").glob(f"*/{FOLDER}/rank*.json")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in records}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - files announce no change
        await asyncio.sleep(0.001)


def going_on_behind(found: Collection[str]) -> Message:
    """The moment at which a build has found the shards of some ranks, and writes the others if there are any."""
    is_whole = len(found) == RANKS
    return Message("the reference" if is_whole else f", but for {len(found)} written before the restart")


async def collect(compiler: CompilerProcess) -> None:
    await compiler.client.bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest())


@pytest.mark.slow
@pytest.mark.parametrize("is_aside", [False, True])
async def test_ranks_that_were_written_before_a_death_are_not_written_again(home: Path, *, is_aside: bool) -> None:
    write_model(home)
    store = Layout.create(home / "store")

    async with run_compiler(home) as compiler:
        # The build dies when it has written some ranks. The next equal compile goes on.
        operation = await start(compiler, is_aside=is_aside)
        await until(lambda: len(list_records(home)) >= 2)
        (build,) = compiler.builds()
        build.kill()
        refused = read_refusal((await compiler.client.finish(operation)).error)
        assert refused.reason == "BUILD_FAILED"
        first = list_records(home)
        await collect(compiler)
        if not is_aside:
            assert list_finished_shards(home / "store" / "jobs") <= set(store.list_blobs())

        # The compiler dies while that one writes.
        operation = await start(compiler, is_aside=is_aside)
        await going_on_behind(first).wait(compiler, home, operation.name)
        if not is_aside:
            await until(lambda: count_staged(home) > 0 or len(list_records(home)) == RANKS)
        await kill(compiler)
    second = list_records(home)
    assert second.items() >= first.items()

    # The next one resumes it.
    async with run_compiler(home) as compiler:
        await going_on_behind(second).wait(compiler, home, operation.name)
        await Message("comparing logits with the reference").wait(compiler, home, operation.name)
        third = list_records(home)
        assert len(third) == RANKS
        assert third.items() >= second.items()
        resumed = response_of(await compiler.client.finish(operation)).digest
        assert list((home / "store" / "jobs").iterdir()) == []

        # The same bytes as without any death.
        again = await start(compiler, is_aside=is_aside, skip_cache_lookup=True)
        assert response_of(await compiler.client.finish(again)).digest == resumed
        await collect(compiler)
    assert check_store(home) == {resumed}
