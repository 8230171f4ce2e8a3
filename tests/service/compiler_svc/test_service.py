import asyncio
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.config.v1 import config_pb2

from bundle.layout import Layout
from compiler_svc.errors import BuildFailed
from compiler_svc.lower.errors import LoweringFailed
from compiler_svc.planning.pool import PlanningPool, make_forkserver
from targets.cpu import X86_64
from tests.bundles.samples import publish_sample
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

#: What sizes and lengths accept.
SIZE = "an integer from 1 to 2147483647 (NxD Inference API guide, General configuration)"
LENGTH = "an integer from 1 to 134217728 (NxD Inference API guide, General configuration)"


class TestCompile:
    async def test_an_operation_goes_from_queued_to_a_version(self, client: Client, runner: DirectedRunner) -> None:
        operation = await client.compile(config_json='{"neuron_config": {"seq_len": 64, "n_positions": 32}}')
        assert operation.name.startswith("operations/")
        assert not operation.done
        assert metadata_of(operation).name == "tiny"
        runner.is_open.set()
        response = response_of(await client.finish(operation))
        assert (response.name, response.version, response.cache) == ("tiny", 1, pb.CACHE_RESULT_MISS)
        assert response.digest.startswith("sha256:")
        assert response.executables[0].tag == "token_generation_16"
        assert response.executables[0].duration.ToTimedelta().total_seconds() == 1.5
        assert response.warnings[0] == "neuron_config.n_positions: sequences end at 32 tokens, although seq_len is 64"
        assert all(level.gain in response.warnings[1] for level in X86_64.list_unused("x86-64-v3"))
        assert 0 < response.duration.ToTimedelta().total_seconds() < 60

    async def test_the_build_gets_the_resolved_configuration(self, client: Client, runner: DirectedRunner) -> None:
        config = config_pb2.InferenceConfig(neuron_config=config_pb2.NeuronConfig(seq_len=64))
        target = pb.Target(kind=pb.Target.KIND_CPU, isa="native")
        await client.reach_build(await client.compile(config=config, salt="s", target=target))
        spec = runner.jobs[0].spec
        assert spec.config.neuron_config.max_context_length == 64
        assert spec.config.neuron_config.torch_dtype == "float32"
        assert spec.target.isa.startswith("x86-64-v")
        assert (spec.salt, spec.optimization_level) == ("s", 1)

    async def test_a_set_zero_is_not_unset(self, client: Client) -> None:
        config = config_pb2.InferenceConfig(neuron_config=config_pb2.NeuronConfig(batch_size=0))
        refused = await refusal(client.compile(config=config))
        assert refused.fields == {
            "neuron_config.batch_size": f"got 0; accepted: {SIZE}",
        }

    async def test_a_relative_path_is_tried_under_each_root(self, home: Path) -> None:
        write_checkpoint(home / "more" / "other")
        async with serve_compiler(home, "--model-root", str(home / "more")) as (client, runner):
            await client.reach_build(await client.compile(model="other"))
            assert runner.jobs[0].spec.model == home / "more" / "other"


class TestRefusals:
    async def test_every_mistake_of_a_configuration(self, client: Client) -> None:
        text = json.dumps({"neuron_config": {"seq_len": "64", "max_contxt_length": 3, "kv_cache_quant": True}})
        refused = await refusal(client.compile(config_json=text))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONFIG_INVALID")
        assert refused.fields == {
            "neuron_config.seq_len": f"got '64'; accepted: {LENGTH}",
            "neuron_config.max_contxt_length": "got 3; accepted: did you mean 'max_context_length'?",
            "neuron_config.kv_cache_quant": "got True; accepted: False, all that this version serves",
        }

    async def test_text_that_is_no_json(self, client: Client) -> None:
        refused = await refusal(client.compile(config_json="seq_len: 3"))
        assert (refused.reason, list(refused.fields)) == ("CONFIG_INVALID", ["config_json"])

    @pytest.mark.parametrize(
        ("fields", "feature"),
        [
            ({"config_json": '{"neuron_config": {"kv_cache_quant": true}}'}, "neuron_config.kv_cache_quant"),
            ({"config_json": '{"neuron_config": {"qk_layernorm": true}}'}, "neuron_config.qk_layernorm"),
        ],
    )
    async def test_a_feature_that_is_not_served(self, client: Client, fields: dict[str, Any], feature: str) -> None:
        refused = await refusal(client.compile(**fields))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FEATURE_NOT_SERVED")
        assert list(refused.fields) == [feature]
        assert refused.metadata["features"] == feature

    async def test_an_unknown_instruction_set(self, client: Client) -> None:
        refused = await refusal(client.compile(target=pb.Target(isa="armv9")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ISA_UNKNOWN")

    async def test_a_missing_compiler(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        with closing(make_forkserver()) as forkserver:
            async with serve_compiler(home, planning=PlanningPool(forkserver)) as (client, _):
                refused = await refusal(client.compile())
                assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOOLCHAIN_MISSING")
                await client.compile(optimization_level=pb.OPTIMIZATION_LEVEL_O0)

    async def test_an_unknown_enum_value(self, client: Client) -> None:
        refused = await refusal(client.compile(optimization_level=9))
        assert (refused.reason, list(refused.fields)) == ("CONFIG_INVALID", ["optimization_level"])

    @pytest.mark.parametrize("name", ["", "Tiny", "-x", "a" * 129, "a/b", "sha256"])
    async def test_a_name_that_is_none(self, client: Client, name: str) -> None:
        refused = await refusal(client.compile(name=name))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NAME_INVALID")
        assert list(refused.fields) == ["name"]

    @pytest.mark.parametrize("model", ["", "missing", "tiny/config.json", "a" * 5000, "nul\0"])
    async def test_a_checkpoint_that_is_not_there(self, client: Client, model: str) -> None:
        refused = await refusal(client.compile(model=model))
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "CHECKPOINT_NOT_FOUND")
        assert list(refused.fields) == ["model"]

    @pytest.mark.parametrize("model", ["..", "../elsewhere", "/etc", "tiny/../../elsewhere", "link"])
    async def test_a_path_that_leaves_the_roots(self, client: Client, home: Path, model: str) -> None:
        write_checkpoint(home / "elsewhere")
        (home / "models" / "link").symlink_to(home / "elsewhere")
        refused = await refusal(client.compile(model=model))
        assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PATH_OUTSIDE_MODEL_ROOTS")
        assert f"a directory below {home / 'models'}" in refused.message
        assert "--model-root DIR" in refused.message
        assert ("a link that leads outside" in refused.message) == (model == "link")

    @pytest.mark.parametrize(
        ("model", "advised"),
        [("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"), ("missing", "OWNER/NAME")],
    )
    async def test_a_missing_checkpoint_says_how_to_get_one(
        self, client: Client, home: Path, model: str, advised: str
    ) -> None:
        refused = await refusal(client.compile(model=model))
        assert f"`kiln pull {advised} --model-root {home / 'models'}`" in refused.message

    async def test_a_link_to_itself(self, client: Client, home: Path) -> None:
        (home / "models" / "loop").symlink_to(home / "models" / "loop")
        assert (await refusal(client.compile(model="loop"))).reason == "CHECKPOINT_NOT_FOUND"

    async def test_a_file_that_leaves_the_roots(self, client: Client, home: Path) -> None:
        weights = home / "models" / "tiny" / "model.safetensors"
        weights.rename(home / "outside.safetensors")
        weights.symlink_to(home / "outside.safetensors")
        assert (await refusal(client.compile())).reason == "CHECKPOINT_INVALID"

    async def test_a_truncated_safetensors_header(self, client: Client, home: Path) -> None:
        weights = home / "models" / "tiny" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        refused = await refusal(client.compile())
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CHECKPOINT_INVALID")
        assert "model.safetensors" in refused.message

    async def test_weights_that_do_not_fit_the_configuration(self, client: Client, home: Path) -> None:
        write_checkpoint(home / "models" / "odd", hidden_size=64)
        assert (await refusal(client.compile(model="odd"))).reason == "CHECKPOINT_INVALID"

    async def test_a_model_that_is_not_built(self, client: Client, home: Path) -> None:
        write_checkpoint(home / "models" / "bert", architectures=["BertModel"])
        refused = await refusal(client.compile(model="bert"))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FEATURE_NOT_SERVED")

    async def test_a_checkpoint_in_a_dtype_that_nothing_is_computed_in(self, client: Client, home: Path) -> None:
        write_checkpoint(home / "models" / "quarter", dtype="float8_e4m3fn")
        refused = await refusal(client.compile(model="quarter"))
        assert refused.fields == {
            "neuron_config.torch_dtype": "got 'float8_e4m3fn' from the checkpoint; "
            "accepted: 'float32' or 'bfloat16' or 'float16', all that this version serves"
        }

    @pytest.mark.parametrize("name", ["operations/none", "none", ""])
    async def test_an_operation_that_is_not_there(self, client: Client, name: str) -> None:
        calls = [
            client.compiler.WatchCompile(pb.WatchCompileRequest(operation=name)),
            client.operations.GetOperation(operations_pb2.GetOperationRequest(name=name)),
            client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=name)),
            client.operations.DeleteOperation(operations_pb2.DeleteOperationRequest(name=name)),
            client.operations.WaitOperation(operations_pb2.WaitOperationRequest(name=name)),
        ]
        for call in calls:
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND")


class TestRequestId:
    async def test_a_repeated_call_finds_its_operation(
        self, client: Client, runner: DirectedRunner, home: Path
    ) -> None:
        first = await client.compile(request_id="r")
        assert (await client.compile(request_id="r")).name == first.name
        runner.is_open.set()
        await client.finish(first)
        (home / "models" / "tiny" / "model.safetensors").unlink()
        again = await client.compile(request_id="r")
        assert again.name == first.name
        assert response_of(again).version == 1
        assert len(runner.jobs) == 1

    async def test_calls_at_the_same_time_have_one_operation(self, client: Client) -> None:
        operations = await asyncio.gather(*(client.compile(request_id="r") for _ in range(8)))
        assert len({operation.name for operation in operations}) == 1

    async def test_another_request_with_the_id_is_refused(self, client: Client) -> None:
        operation = await client.compile(request_id="r")
        refused = await refusal(client.compile(request_id="r", name="other"))
        assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
        assert refused.metadata == {"request_id": "r", "operation": operation.name}


class TestWatch:
    async def test_events_end_with_the_result(self, client: Client, runner: DirectedRunner) -> None:
        operation = await client.compile()
        watching = asyncio.create_task(client.watch(operation.name))
        await client.reach_build(operation)
        runner.is_open.set()
        events = await watching
        assert [event.WhichOneof("event") for event in events[:-1]] == ["progress"] * (len(events) - 1)
        assert events[-1].result == response_of(await client.get(operation.name))
        last = events[-2].progress
        assert (last.stage, last.executables_done, last.executables_total) == (pb.COMPILE_STAGE_LOWER, 1, 2)
        assert last.eta.ToTimedelta().total_seconds() == 2.0
        assert last.update_time.ToNanoseconds() >= last.create_time.ToNanoseconds()

    async def test_a_finished_operation_is_one_event(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        operation = await client.finish(await client.compile())
        (event,) = await client.watch(operation.name)
        assert event.result == response_of(operation)

    async def test_a_failure_is_the_status_of_the_operation(self, client: Client, runner: DirectedRunner) -> None:
        runner.error = LoweringFailed("token_generation_16", "SIGSEGV")
        runner.is_open.set()
        operation = await client.finish(await client.compile())
        (event,) = await client.watch(operation.name)
        assert event.error == operation.error
        refused = read_refusal(operation.error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "LOWERING_FAILED")
        assert refused.metadata["tag"] == "token_generation_16"


class TestWait:
    async def test_it_returns_after_the_timeout(self, client: Client) -> None:
        operation = await client.compile()
        request = operations_pb2.WaitOperationRequest(name=operation.name, timeout=Duration(nanos=200_000_000))
        start = time.monotonic()
        with running_time() as taken:
            assert not (await client.operations.WaitOperation(request)).done
        assert time.monotonic() - start > 0.15
        assert taken.s < 2

    async def test_it_returns_before_the_deadline(self, client: Client) -> None:
        operation = await client.compile()
        request = operations_pb2.WaitOperationRequest(name=operation.name)
        assert not (await client.operations.WaitOperation(request, timeout=1)).done

    @pytest.mark.parametrize("seconds", [-1, 315_576_000_000])
    async def test_any_timeout_is_taken(self, client: Client, runner: DirectedRunner, seconds: int) -> None:
        runner.is_open.set()
        operation = await client.finish(await client.compile())
        request = operations_pb2.WaitOperationRequest(name=operation.name, timeout=Duration(seconds=seconds))
        assert (await client.operations.WaitOperation(request)).done


class TestOperations:
    async def test_lists_page_and_filter(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        finished = [(await client.finish(await client.compile(salt=str(number)))).name for number in range(3)]
        runner.is_open.clear()
        running = (await client.compile(salt="running")).name
        listed: list[str] = []
        token = ""
        while True:
            page = await client.operations.ListOperations(
                operations_pb2.ListOperationsRequest(name="operations", page_size=3, page_token=token)
            )
            listed += [operation.name for operation in page.operations]
            if not (token := page.next_page_token):
                break
        assert listed == [running, *reversed(finished)]
        done = await client.operations.ListOperations(operations_pb2.ListOperationsRequest(filter="done=true"))
        assert [operation.name for operation in done.operations] == finished[::-1]
        not_done = await client.operations.ListOperations(operations_pb2.ListOperationsRequest(filter="done=false"))
        assert [operation.name for operation in not_done.operations] == [running]

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"filter": "name=x"}, "FILTER_INVALID"),
            ({"page_token": "x"}, "PAGE_TOKEN_INVALID"),
        ],
    )
    async def test_a_list_that_makes_no_sense(self, client: Client, fields: dict[str, str], reason: str) -> None:
        refused = await refusal(client.operations.ListOperations(operations_pb2.ListOperationsRequest(**fields)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)

    async def test_deleting_forgets_what_is_finished(self, client: Client, runner: DirectedRunner) -> None:
        operation = await client.compile()
        request = operations_pb2.DeleteOperationRequest(name=operation.name)
        refused = await refusal(client.operations.DeleteOperation(request))
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OPERATION_NOT_DONE")
        runner.is_open.set()
        await client.finish(operation)
        await client.operations.DeleteOperation(request)
        assert (await refusal(client.get(operation.name))).reason == "OPERATION_NOT_FOUND"


class TestCancel:
    async def test_a_running_build_ends(self, client: Client, runner: DirectedRunner) -> None:
        operation = await client.compile()
        await client.reach_build(operation)
        await client.cancel(operation.name)
        done = await client.finish(operation)
        refused = read_refusal(done.error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.CANCELLED, "COMPILE_CANCELLED")
        assert refused.metadata == {"operation": operation.name}
        assert runner.cancelled == 1

    async def test_a_finished_operation_stays_as_it_is(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        operation = await client.finish(await client.compile())
        await client.cancel(operation.name)
        assert await client.get(operation.name) == operation

    async def test_a_cancelled_compile_can_be_had_again(self, client: Client, runner: DirectedRunner) -> None:
        operation = await client.compile()
        await client.reach_build(operation)
        await client.cancel(operation.name)
        await client.finish(operation)
        runner.is_open.set()
        response = response_of(await client.finish(await client.compile()))
        assert (response.version, response.cache) == (1, pb.CACHE_RESULT_MISS)

    async def test_cancelling_twice_is_cancelling_once(self, client: Client) -> None:
        operation = await client.compile()
        await asyncio.gather(*(client.cancel(operation.name) for _ in range(5)))
        assert read_refusal((await client.finish(operation)).error).reason == "COMPILE_CANCELLED"


class TestFailures:
    async def test_an_unexpected_one_is_named_and_tells_nothing(self, client: Client, runner: DirectedRunner) -> None:
        runner.error = ValueError("a secret of ours")
        runner.is_open.set()
        refused = read_refusal((await client.finish(await client.compile())).error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "BUILD_FAILED")
        assert "secret" not in refused.message

    async def test_a_failure_does_not_poison_the_cache(self, client: Client, runner: DirectedRunner) -> None:
        runner.error = BuildFailed("out of memory")
        runner.is_open.set()
        assert (await client.finish(await client.compile())).error.code
        runner.error = None
        response = response_of(await client.finish(await client.compile()))
        assert (response.version, response.cache) == (1, pb.CACHE_RESULT_MISS)


async def test_a_start_sweeps_and_survives_a_store_that_cannot_be_swept(home: Path) -> None:
    layout = Layout.create(home / "store")
    abandoned = layout.put_blob(b"of a build that was killed").digest
    async with serve_compiler(home):
        assert not layout.has(abandoned)
    manifest = layout.blob_path(publish_sample(layout))
    manifest.chmod(0o644)
    manifest.write_bytes(b"{}")
    async with serve_compiler(home) as (client, runner):
        runner.is_open.set()
        assert response_of(await client.finish(await client.compile())).version == 1
