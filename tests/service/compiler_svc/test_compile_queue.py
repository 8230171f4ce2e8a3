"""What accepted compiles share: the cache, builds in flight, and the turns of builds."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.config.v1 import config_pb2

from tests.checkpoints.random_weights import write_checkpoint
from tests.running_time import running_time
from tests.servers.running_compiler import (
    Client,
    DirectedRunner,
    metadata_of,
    read_refusal,
    refusal,
    response_of,
    serve_compiler,
)


class TestCache:
    async def test_the_second_compile_is_a_hit_and_quick(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        first = response_of(await client.finish(await client.compile()))
        with running_time() as taken:
            second = response_of(await client.finish(await client.compile()))
        assert taken.s < 1
        assert (second.version, second.digest, second.cache) == (1, first.digest, pb.CACHE_RESULT_HIT)
        assert [executable.cache for executable in second.executables] == [pb.CACHE_RESULT_HIT] * 2
        assert not second.executables[0].HasField("duration")
        assert len(runner.jobs) == 1

    async def test_another_name_is_a_hit_with_a_version_of_its_own(
        self, client: Client, runner: DirectedRunner
    ) -> None:
        runner.is_open.set()
        first = response_of(await client.finish(await client.compile(name="a")))
        second = response_of(await client.finish(await client.compile(name="b")))
        assert (second.name, second.version, second.digest) == ("b", 1, first.digest)
        assert len(runner.jobs) == 1

    @pytest.mark.parametrize(
        "fields",
        [
            {"skip_cache_lookup": True},
            {"salt": "x"},
            {"optimization_level": pb.OPTIMIZATION_LEVEL_O2},
            {"config_json": '{"neuron_config": {"seq_len": 64}}'},
        ],
    )
    async def test_what_makes_a_miss(self, client: Client, runner: DirectedRunner, fields: dict[str, Any]) -> None:
        runner.is_open.set()
        await client.finish(await client.compile())
        await client.finish(await client.compile(**fields))
        assert len(runner.jobs) == 2

    @pytest.mark.parametrize(
        "name",
        ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "README.md", "LICENSE"],
    )
    async def test_a_changed_file_is_a_miss(
        self, client: Client, runner: DirectedRunner, home: Path, name: str
    ) -> None:
        runner.is_open.set()
        await client.finish(await client.compile())
        other = write_checkpoint(home / "other", seed=1, bos_token_id=4)
        (other / "tokenizer.json").write_text("{}")
        (other / "generation_config.json").write_text("{}")
        for document in ("README.md", "LICENSE"):
            (other / document).write_text("Do as you like.")
        (other / name).replace(home / "models" / "tiny" / name)
        response = response_of(await client.finish(await client.compile()))
        assert response.cache == pb.CACHE_RESULT_MISS
        assert len(runner.jobs) == 2

    async def test_a_bundle_that_the_store_lost_is_a_miss(
        self, client: Client, runner: DirectedRunner, home: Path
    ) -> None:
        runner.is_open.set()
        first = response_of(await client.finish(await client.compile()))
        (home / "store" / "blobs" / "sha256" / first.digest.removeprefix("sha256:")).unlink()
        assert response_of(await client.finish(await client.compile())).cache == pb.CACHE_RESULT_MISS

    async def test_an_equal_configuration_in_other_words_is_a_hit(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        await client.finish(await client.compile(config_json='{"neuron_config": {"seq_len": 128}}'))
        config = config_pb2.InferenceConfig(neuron_config=config_pb2.NeuronConfig(torch_dtype="torch.float32"))
        assert response_of(await client.finish(await client.compile(config=config))).cache == pb.CACHE_RESULT_HIT


class TestSingleFlight:
    async def test_equal_compiles_at_once_are_one_build(self, client: Client, runner: DirectedRunner) -> None:
        operations = [await client.compile(name=name) for name in ("a", "b", "c")]
        await client.reach_build(*operations)
        runner.is_open.set()
        responses = [response_of(await client.finish(operation)) for operation in operations]
        assert len(runner.jobs) == 1
        assert [(response.name, response.version) for response in responses] == [("a", 1), ("b", 1), ("c", 1)]
        assert len({response.digest for response in responses}) == 1

    async def test_a_build_lives_as_long_as_somebody_waits_for_it(self, client: Client, runner: DirectedRunner) -> None:
        first, second = [await client.compile(name=name) for name in ("a", "b")]
        await client.reach_build(first, second)
        await client.cancel(first.name)
        assert read_refusal((await client.finish(first)).error).reason == "COMPILE_CANCELLED"
        assert runner.cancelled == 0
        assert metadata_of(await client.get(second.name)).executables_done == 1
        runner.is_open.set()
        assert response_of(await client.finish(second)).version == 1
        assert len(runner.jobs) == 1

    async def test_cancelling_all_ends_the_build(self, client: Client, runner: DirectedRunner) -> None:
        operations = [await client.compile(name=name) for name in ("a", "b")]
        await client.reach_build(*operations)
        await asyncio.gather(*(client.cancel(operation.name) for operation in operations))
        for operation in operations:
            await client.finish(operation)
        assert runner.cancelled == 1


class TestQueue:
    async def test_builds_wait_for_their_turn_and_their_number_is_bounded(self, home: Path) -> None:
        async with serve_compiler(home, "--max-builds", "1", "--max-waiting", "1") as (client, runner):
            first = await client.compile(salt="1")
            await client.reach_build(first)
            second = await client.compile(salt="2")
            waiting = await client.reach(second, "waiting for a free build slot")
            assert waiting.stage == pb.COMPILE_STAGE_QUEUED
            assert len(runner.jobs) == 1
            refused = await refusal(client.compile(salt="3"))
            assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "COMPILE_QUEUE_FULL")
            assert refused.retry_after_s is not None
            assert refused.metadata == {"queue_size": "1"}
            runner.is_open.set()
            await client.finish(first)
            await client.finish(second)
            assert response_of(await client.finish(await client.compile(salt="3"))).version == 1

    async def test_a_waiting_compile_can_be_cancelled(self, home: Path) -> None:
        async with serve_compiler(home, "--max-builds", "1", "--max-waiting", "1") as (client, runner):
            first = await client.compile(salt="1")
            await client.reach_build(first)
            second = await client.compile(salt="2")
            await client.reach(second, "waiting for a free build slot")
            await client.cancel(second.name)
            assert read_refusal((await client.finish(second)).error).reason == "COMPILE_CANCELLED"
            runner.is_open.set()
            await client.finish(first)
            assert len(runner.jobs) == 1
