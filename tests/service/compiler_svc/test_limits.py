"""Everything that clients can use up has a bound, and temporary refusals say when to try again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.config.v1 import config_pb2

from bundle.store.layout import Layout
from compiler_svc.api.bundles import MAX_BLOB_STREAMS
from compiler_svc.api.limits import MAX_REQUEST_ID_CHARACTERS, MAX_SALT_CHARACTERS, REQUEST_LIMIT
from compiler_svc.compiles.journal import MAX_WATCHERS
from compiler_svc.config.domains import MAX_BUCKETS
from tests.hang_guard import HANG_S
from tests.servers.refusals import refusal, refused
from tests.servers.running_compiler import Client, serve_compiler

GIB = 1 << 30


class TestRequests:
    async def test_what_is_too_long(self, client: Client) -> None:
        longest = {"request_id": "r" * MAX_REQUEST_ID_CHARACTERS, "salt": "s" * MAX_SALT_CHARACTERS}
        for field, text in longest.items():
            how = await refused(client.compile(**{field: f"{text}x"}), "INVALID_ARGUMENT", "CONFIG_INVALID", field)
            assert "at most" in how.fields[field]
        await client.compile(**longest)

    async def test_a_request_that_is_too_large_is_not_parsed(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def parse(*_: Any) -> None:
            raise AssertionError("parsed")

        monkeypatch.setattr("compiler_svc.api.compiler.check_limits", parse)
        buckets = range(1 << 20, (1 << 20) + REQUEST_LIMIT.max_bytes)
        neuron_config = config_pb2.NeuronConfig(context_encoding_buckets=buckets)
        requests = (
            {"config_json": '{"neuron_config": {}}' + " " * REQUEST_LIMIT.max_bytes},
            {"config": config_pb2.InferenceConfig(neuron_config=neuron_config)},
        )
        for fields in requests:
            for call in (client.compile(**fields), client.plan(**fields)):
                how = await refused(call, "INVALID_ARGUMENT", "REQUEST_TOO_LARGE")
                assert "at most" in how.fields["request"]

    async def test_a_request_of_many_fields_is_too_large(self, client: Client) -> None:
        """The parser would make a Python object of each."""
        empty_update = b"\x0a\x00"
        request = empty_update * (REQUEST_LIMIT.max_bytes // len(empty_update))
        call = client.channel.unary_unary("/kiln.compiler.v1.CompilerService/Compile")(request)
        how = await refused(call, "INVALID_ARGUMENT", "REQUEST_TOO_LARGE")
        assert "fields" in how.fields["request"]

    async def test_buckets(self, client: Client) -> None:
        config = {"seq_len": 1024, "enable_bucketing": True, "token_generation_buckets": [*range(1, MAX_BUCKETS + 2)]}
        how = await refusal(client.compile(neuron_config=config))
        accepted = f"accepted: a list of at most {MAX_BUCKETS} integers"
        assert accepted in how.fields["neuron_config.token_generation_buckets"]


async def test_a_full_queue_does_not_validate(home: Path) -> None:
    async with serve_compiler(home, "--max-builds", "1", "--max-waiting", "1") as (client, _):
        for salt in "ab":
            await client.compile(salt=salt)
        request = pb.ShardWeightsRequest(name="x", model="nowhere", executables_ref="nothing")
        quantize = pb.QuantizeWeightsRequest(model="nowhere", output="x")
        for call in (
            client.compile(model="nowhere"),
            client.compiler.ShardWeights(request),
            client.compiler.QuantizeWeights(quantize),
        ):
            how = await refused(call, "RESOURCE_EXHAUSTED", "COMPILE_QUEUE_FULL")
            assert how.retry_after_s == 15


async def test_watchers_of_one_operation(client: Client) -> None:
    operation = await client.compile()
    request = pb.WatchCompileRequest(operation=operation.name)
    watching = [client.compiler.WatchCompile(request) for _ in range(MAX_WATCHERS)]
    for stream in watching:
        await stream.read()
    waiting = client.operations.WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name))
    for call in (client.compiler.WatchCompile(request), waiting):
        assert (await refused(call, "RESOURCE_EXHAUSTED", "TOO_MANY_WATCHERS")).retry_after_s == 5
    watching.pop().cancel()
    while True:
        stream = client.compiler.WatchCompile(request)
        try:
            await stream.read()
            break
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.01)
    for stream in watching:
        stream.cancel()


@asynccontextmanager
async def hold_streams(client: Client, home: Path) -> AsyncIterator[bundle_pb2.ReadBlobRequest]:
    """Holds as many streams of a blob as may be; it has more than a connection's flow control takes."""
    request = bundle_pb2.ReadBlobRequest(digest=Layout(home / "store").put_blob(bytes(64 << 20)).digest)
    streams = [client.bundles.ReadBlob(request) for _ in range(MAX_BLOB_STREAMS)]
    for stream in streams:
        await stream.read()
    yield request
    for stream in streams:
        stream.cancel()


async def test_streams_of_blobs(client: Client, home: Path) -> None:
    async with hold_streams(client, home) as request:
        metadata = {"method": "ReadBlob", "limit": str(MAX_BLOB_STREAMS)}
        await refused(client.bundles.ReadBlob(request), "RESOURCE_EXHAUSTED", "TOO_MANY_STREAMS", **metadata)


async def test_streams_of_blobs_that_no_one_reads_end(home: Path) -> None:
    async with (
        serve_compiler(home, "--stall-timeout", "0.5") as (client, _),
        hold_streams(client, home) as request,
    ):
        async with asyncio.timeout(HANG_S):
            while True:
                reading = client.bundles.ReadBlob(request)
                try:
                    sizes = [len(response.data) async for response in reading]
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)
        assert sum(sizes) == 64 << 20, "another client reads the whole blob"


async def test_finished_operations_are_kept_in_a_limited_number(home: Path) -> None:
    async with serve_compiler(home, "--keep-operations", "2") as (client, runner):
        runner.is_open.set()
        names = [(await client.finish(await client.compile(salt=str(number)))).name for number in range(4)]
        listed = await client.operations.ListOperations(operations_pb2.ListOperationsRequest())
        assert [operation.name for operation in listed.operations] == names[:1:-1]
        assert (await refusal(client.get(names[0]))).reason == "OPERATION_NOT_FOUND"


async def test_a_build_is_told_its_limits(home: Path) -> None:
    async with serve_compiler(home, "--lowering-memory", "6GiB", "--lowering-timeout", "7") as (client, runner):
        await client.reach_build(await client.compile())
        environment = runner.jobs[0].environment
    assert (environment.lowering_memory_bytes, environment.lowering_timeout_s) == (6 * GIB, 7.0)
