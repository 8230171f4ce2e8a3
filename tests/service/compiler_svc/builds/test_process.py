"""Real builds at optimization level 0, by a compiler in a process of its own."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from google.longrunning.operations_pb2 import Operation
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.numpy import load_file, save_file

from bundle.manifest import Limits
from bundle.manifest_parser import parse_manifest
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.verification import BlobVerifier
from tests.checkpoints.random_weights import write_checkpoint
from tests.hang_guard import until
from tests.processes import living_descendants
from tests.servers.compiler_process import CompilerEnded, CompilerProcess, run_compiler, wait_until_gone
from tests.servers.halt import SITE, VARIABLE, Halt
from tests.servers.running_compiler import Client, response_of
from tests.servers.traces import CLIENT_SPAN_ID, TRACE_ID, TRACED, UNSAMPLED, collect_traces

CONFIG = {
    "seq_len": 32,
    "batch_size": 2,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
    "enable_bucketing": True,
    "context_encoding_buckets": [8],
    "token_generation_buckets": [16, 32],
    "on_device_sampling_config": {"dynamic": True, "global_topk": 8},
}


TINY: dict[str, Any] = {"neuron_config": CONFIG, "optimization_level": pb.OPTIMIZATION_LEVEL_O0}


async def test_a_checkpoint_becomes_a_bundle_and_comes_from_the_cache_afterwards(home: Path) -> None:
    with collect_traces() as collector:
        await compile_with_and_without_the_cache(home, collector.endpoint)
    call = collector.find("kiln.compiler.v1.CompilerService/Compile")
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE_ID, CLIENT_SPAN_ID)
    # token_generation_32 has the graph of token_generation_16.
    tags = ["context_encoding_8", "token_generation_16"]
    parts = collector.children(call)
    assert parts[:2] == ["queued", "cache_check"]
    assert [name for name in parts if name.startswith("export ")] == [f"export {tag}" for tag in tags]
    assert {name for name in parts if name.startswith("lower ")} == {f"lower {tag}" for tag in tags}
    assert {"trace", "lower", "shard", "verify", "publish"} < set(parts), "stages, as the service sees them"
    assert [one.key for one in collector.find("build process").attributes] == ["process.pid"]


async def compile_with_and_without_the_cache(home: Path, trace_endpoint: str) -> None:
    """Compiles several times; the first call alone is sampled."""
    async with run_compiler(home, "--trace-endpoint", trace_endpoint) as compiler:
        client = compiler.client
        operation = await client.compile(**TINY, metadata=TRACED)
        events = await client.watch(operation.name)
        stages = list(dict.fromkeys(event.progress.stage for event in events[:-1]))
        named = [pb.CompileStage.Name(stage).removeprefix("COMPILE_STAGE_") for stage in stages]
        assert named[-5:] == ["TRACE", "LOWER", "SHARD", "VERIFY", "PUBLISH"]
        lowering = [event.progress for event in events if event.progress.stage == pb.COMPILE_STAGE_LOWER]
        assert all(progress.HasField("eta") for progress in lowering), "on a host without records, too"
        last = events[-2].progress
        assert (last.executables_done, last.executables_total, last.executables_cached) == (3, 3, 0)
        assert last.sharded_bytes >= last.total_bytes > 0
        result = events[-1].result
        assert (result.version, result.cache) == (1, pb.CACHE_RESULT_MISS)
        tags = ["context_encoding_8", "token_generation_16", "token_generation_32"]
        assert [executable.tag for executable in result.executables] == tags
        made = [pb.CACHE_RESULT_MISS, pb.CACHE_RESULT_MISS, pb.CACHE_RESULT_HIT]
        assert [executable.cache for executable in result.executables] == made, "buckets that read the cache share one"

        check_bundle(home, result.digest, await get_bundle(client, "tiny:v1"))

        again = await client.build(**TINY, name="other", metadata=UNSAMPLED)
        assert (again.cache, again.digest, again.version) == (pb.CACHE_RESULT_HIT, result.digest, 1)

        rebuilt = await client.build(**TINY, skip_cache_lookup=True, metadata=UNSAMPLED)
        assert (rebuilt.cache, rebuilt.digest, rebuilt.version) == (pb.CACHE_RESULT_MISS, result.digest, 1)

        buckets = {"neuron_config": CONFIG | {"context_encoding_buckets": [8, 16]}}
        more = await client.build(**TINY | buckets, metadata=UNSAMPLED)
        assert (more.cache, more.version) == (pb.CACHE_RESULT_MISS, 2)
        reused = {executable.tag for executable in more.executables if executable.cache == pb.CACHE_RESULT_HIT}
        assert reused == set(tags)

        assert {name for name in compiler.libraries() if "torch" in name} == set()
        assert list((home / "store" / "jobs").iterdir()) == []


async def get_bundle(client: Client, ref: str) -> bundle_pb2.Bundle:
    response: bundle_pb2.GetBundleResponse = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=ref))
    return response.bundle


def check_bundle(home: Path, digest: str, described: bundle_pb2.Bundle) -> None:
    bundle = open_bundle(Layout(home / "store"), digest)
    bundle.verify(BlobVerifier(None))
    manifest = bundle.manifest
    assert manifest == parse_manifest(described.manifest_json)
    assert manifest.limits == Limits(
        max_context_length=32, max_length=32, max_new_tokens=None, ctx_batch_size=1, tkg_batch_size=2
    )
    assert manifest.state.num_slots == 2
    assert len({one.blob for one in manifest.executables_of("token_generation")}) == 1
    assert manifest.config["neuron_config"]["max_length"] == 32
    assert manifest.config["hidden_size"] == 32
    assert (manifest.sampling.mode, manifest.sampling.dynamic, manifest.sampling.temperature) == ("on_device", True, 0)
    assert manifest.tokens.eos == (2, 3)
    assert manifest.tokenizer is not None
    assert {blob.title for blob in described.blobs} == {
        "",
        "config.json",
        "executables/context_encoding_8.pt2",
        "executables/token_generation_16.pt2",
        "generation_config.json",
        "manifest.json",
        "neuron_config.json",
        "tokenizer.json",
        "weights/tp0_sharded_checkpoint.safetensors",
    }


async def test_builds_that_are_cancelled_killed_or_given_what_is_invalid_leave_nothing_and_others_resume(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt = Halt(home / "halt")
    monkeypatch.setenv(VARIABLE, str(halt.folder))
    async with run_compiler(home, site=SITE) as compiler:
        operation = await compiler.client.compile(**TINY)
        processes = await reach_trace(compiler, operation.name)
        await compiler.client.cancel(operation.name)
        await compiler.client.fail(operation, "CANCELLED", "COMPILE_CANCELLED")
        await wait_until_gone(*processes)
        assert list((home / "store" / "jobs").iterdir()) == []
        assert Layout(home / "store").read_index().manifests == ()

        # The same compiler, whose forkserver is warm by now: a build that is killed fails by name.
        operation = await compiler.client.compile(**TINY)
        (build, *_) = await reach_trace(compiler, operation.name)
        build.kill()
        how = await compiler.client.fail(operation, "INTERNAL", "BUILD_FAILED")
        assert "killed by SIGKILL" in how.message
        assert Layout(home / "store").read_index().manifests == ()

        # A blob that is written, and has no name yet.
        halt.order("^kiln-build rename .*/blobs/sha256/[^/]+$")
        operation = await compiler.client.compile(**TINY)
        await until(halt.find)
        assert unfinished_blobs(home), "the build is cancelled while it writes"
        await compiler.client.cancel(operation.name)
        await compiler.client.finish(operation)
        assert unfinished_blobs(home) == []

        await check_checkpoints_that_only_a_build_finds_invalid(compiler, home)

        halt.withdraw()
        operation = await kill_with_its_build(compiler)
    await check_resumption(home, operation)


async def check_checkpoints_that_only_a_build_finds_invalid(compiler: CompilerProcess, home: Path) -> None:
    pickled = write_checkpoint(home / "models" / "pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"no pickle")
    operation = await compiler.client.compile(**TINY, model="pickled")
    await compiler.client.fail(operation, "INVALID_ARGUMENT", "CHECKPOINT_INVALID")

    # Numbers that no golden check passes.
    invalid = write_checkpoint(home / "models" / "invalid") / "model.safetensors"
    tensors = load_file(invalid)
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    save_file(tensors, invalid)
    operation = await compiler.client.compile(**TINY, model="invalid")
    how = await compiler.client.fail(operation, "INVALID_ARGUMENT", "CHECKPOINT_INVALID")
    assert how.fields == {"model.layers.1.mlp.up_proj.weight": "got nan at [2, 3]; accepted: finite numbers"}

    # Text that no runtime could load is found before anything is lowered.
    truncated = write_checkpoint(home / "models" / "truncated") / "tokenizer.json"
    truncated.write_text(truncated.read_text()[:40])
    operation = await compiler.client.compile(**TINY, model="truncated")
    events = await compiler.client.watch(operation.name)
    assert pb.COMPILE_STAGE_LOWER not in [event.progress.stage for event in events]
    await compiler.client.fail(operation, "INVALID_ARGUMENT", "CHECKPOINT_INVALID", "tokenizer")
    assert {name for name in compiler.libraries() if "torch" in name} == set()


async def kill_with_its_build(compiler: CompilerProcess) -> Operation:
    operation = await compiler.client.compile(**TINY)
    processes = await reach_trace(compiler, operation.name)
    watching = asyncio.create_task(ending(compiler.client, operation.name))
    compiler.process.kill()
    await wait_until_gone(*processes)
    assert await watching is grpc.StatusCode.UNAVAILABLE
    return operation


async def check_resumption(home: Path, operation: Operation) -> None:
    """The next compiler finishes the build, refuses another one beside it, and ends with builds that go on."""
    async with run_compiler(home) as compiler:
        response = response_of(await compiler.client.finish(operation))
        assert (response.version, response.cache) == (1, pb.CACHE_RESULT_MISS)
        check_bundle(home, response.digest, await get_bundle(compiler.client, "tiny"))
        assert list((home / "store" / "jobs").iterdir()) == []
        with pytest.raises(CompilerEnded, match=r"^1$"):
            async with run_compiler(home):
                pass
        assert compiler.process.returncode is None, "a second one on the store has ended, not this one"

        operation = await compiler.client.compile(**TINY, salt="another build")
        processes = await reach_trace(compiler, operation.name)
        watching = asyncio.create_task(ending(compiler.client, operation.name))
        compiler.process.terminate()
        assert await compiler.process.wait() == 0
        assert await watching is grpc.StatusCode.UNAVAILABLE
        await wait_until_gone(*processes)


async def ending(client: Client, operation: str) -> grpc.StatusCode:
    """How a watcher's stream ends."""
    try:
        await client.watch(operation)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def unfinished_blobs(home: Path) -> list[Path]:
    return list((home / "store" / ".kiln" / "staging").iterdir())


async def reach_trace(compiler: CompilerProcess, operation: str) -> list[psutil.Process]:
    """Waits until a build exports graphs; returns its processes, the leader first."""
    async for event in compiler.client.compiler.WatchCompile(pb.WatchCompileRequest(operation=operation)):
        if event.progress.stage == pb.COMPILE_STAGE_TRACE:
            while not (builds := compiler.builds()):  # noqa: ASYNC110 - processes announce no start
                await asyncio.sleep(0.01)
            return [*builds, *living_descendants(builds[0].pid)]
    raise AssertionError("the build ended early")
