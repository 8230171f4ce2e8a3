"""What accepted compiles share: the cache, builds in flight, and the turns of builds."""

from pathlib import Path

from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.config.v1 import config_pb2

from tests.checkpoints.random_weights import write_checkpoint
from tests.running_time import running_time
from tests.servers.refusals import refused
from tests.servers.running_compiler import Client, DirectedRunner, metadata_of, response_of, serve_compiler


class TestCache:
    async def test_the_second_compile_is_a_hit_and_quick(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        first = await client.build()
        with running_time() as taken:
            second = await client.build()
        assert taken.s < 1
        assert (second.version, second.digest, second.cache) == (1, first.digest, pb.CACHE_RESULT_HIT)
        assert [executable.cache for executable in second.executables] == [pb.CACHE_RESULT_HIT] * 2
        assert not second.executables[0].HasField("duration")
        other = await client.build(name="other")
        assert (other.name, other.version, other.digest) == ("other", 1, first.digest)
        assert len(runner.jobs) == 1

    async def test_a_changed_file_is_a_miss(self, client: Client, runner: DirectedRunner, home: Path) -> None:
        other = write_checkpoint(home / "other", seed=1, bos_token_id=4)
        for name, text in {
            "tokenizer.json": "{}",
            "generation_config.json": "{}",
            "README.md": "Do as you like.",
            "LICENSE": "Do as you like.",
        }.items():
            (other / name).write_text(text)
        runner.is_open.set()
        await client.finish(await client.compile())
        for count, file in enumerate(sorted(other.iterdir()), 2):
            file.replace(home / "models" / "tiny" / file.name)
            response = await client.build()
            assert (response.cache, len(runner.jobs)) == (pb.CACHE_RESULT_MISS, count), file.name
        assert count == 7

    async def test_a_bundle_that_the_store_lost_is_a_miss(
        self, client: Client, runner: DirectedRunner, home: Path
    ) -> None:
        runner.is_open.set()
        first = await client.build()
        (home / "store" / "blobs" / "sha256" / first.digest.removeprefix("sha256:")).unlink()
        assert (await client.build()).cache == pb.CACHE_RESULT_MISS

    async def test_an_equal_configuration_in_other_words_is_a_hit(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        await client.finish(await client.compile(config_json='{"neuron_config": {"seq_len": 128}}'))
        config = config_pb2.InferenceConfig(neuron_config=config_pb2.NeuronConfig(torch_dtype="torch.float32"))
        assert (await client.build(config=config)).cache == pb.CACHE_RESULT_HIT


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
        await client.fail(first, "CANCELLED", "COMPILE_CANCELLED")
        assert runner.cancelled == 0
        assert metadata_of(await client.get(second.name)).executables_done == 1
        runner.is_open.set()
        assert response_of(await client.finish(second)).version == 1
        assert len(runner.jobs) == 1


async def test_builds_wait_for_their_turn_and_their_number_is_bounded(home: Path) -> None:
    async with serve_compiler(home, "--max-builds", "1", "--max-waiting", "1") as (client, runner):
        first = await client.compile(salt="1")
        await client.reach_build(first)
        second = await client.compile(salt="2")
        waiting = await client.reach(second, "waiting for a free build slot")
        assert waiting.stage == pb.COMPILE_STAGE_QUEUED
        assert len(runner.jobs) == 1
        await refused(client.compile(salt="3"), "RESOURCE_EXHAUSTED", "COMPILE_QUEUE_FULL", queue_size="1")
        runner.is_open.set()
        await client.finish(first)
        await client.finish(second)
        assert (await client.build(salt="3")).version == 1
