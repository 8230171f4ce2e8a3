import asyncio
import time
from contextlib import closing
from pathlib import Path

import pytest
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.config.v1 import config_pb2

from compiler_svc.errors import BuildFailed
from compiler_svc.lower.errors import LoweringFailed
from compiler_svc.planning.pool import PlanningPool, make_forkserver
from targets.cpu import X86_64
from tests.checkpoints.random_weights import write_checkpoint
from tests.running_time import running_time
from tests.servers.refusals import expect, refusal, refused
from tests.servers.running_compiler import Client, DirectedRunner, metadata_of, response_of, serve_compiler

#: What sizes and lengths accept.
SIZE = "an integer from 1 to 2147483647 (NxD Inference API guide, General configuration)"
LENGTH = "an integer from 1 to 134217728 (NxD Inference API guide, General configuration)"
NO_NAMES = ("", "Tiny", "-x", "a" * 129, "a/b", "sha256")
NO_MODELS = ("", "missing", "loop", "tiny/config.json", "a" * 5000, "nul\0")


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
        how = await refusal(client.compile(config=config))
        assert how.fields == {"neuron_config.batch_size": f"got 0; accepted: {SIZE}"}

    async def test_a_relative_path_is_tried_under_each_root(self, home: Path) -> None:
        write_checkpoint(home / "more" / "other")
        async with serve_compiler(home, "--model-root", str(home / "more")) as (client, runner):
            await client.reach_build(await client.compile(model="other"))
            assert runner.jobs[0].spec.model == home / "more" / "other"


class TestRefusals:
    async def test_every_mistake_of_a_configuration(self, client: Client) -> None:
        mistakes = {"seq_len": "64", "max_contxt_length": 3, "flash_decoding_enabled": True}
        how = await refused(client.compile(neuron_config=mistakes), "INVALID_ARGUMENT", "CONFIG_INVALID")
        assert how.fields == {
            "neuron_config.seq_len": f"got '64'; accepted: {LENGTH}",
            "neuron_config.max_contxt_length": "got 3; accepted: did you mean 'max_context_length'?",
            "neuron_config.flash_decoding_enabled": "got True; accepted: False, all that this version serves",
        }

    async def test_of_single_fields(self, client: Client, home: Path) -> None:
        (home / "models" / "loop").symlink_to(home / "models" / "loop")
        invalid = "INVALID_ARGUMENT"
        for fields, field, code, reason in [
            ({"config_json": "seq_len: 3"}, "config_json", invalid, "CONFIG_INVALID"),
            ({"optimization_level": 9}, "optimization_level", invalid, "CONFIG_INVALID"),
            ({"target": pb.Target(isa="armv9")}, "isa", invalid, "ISA_UNKNOWN"),
            *(({"name": name}, "name", invalid, "NAME_INVALID") for name in NO_NAMES),
            *(({"model": model}, "model", "NOT_FOUND", "CHECKPOINT_NOT_FOUND") for model in NO_MODELS),
        ]:
            how = await refusal(client.compile(**fields))
            assert (how.code.name, how.reason, list(how.fields)) == (code, reason, [field]), fields

    @pytest.mark.parametrize("attribute", ["flash_decoding_enabled", "qk_layernorm"])
    async def test_a_feature_that_is_not_served(self, client: Client, attribute: str) -> None:
        name = f"neuron_config.{attribute}"
        call = client.compile(neuron_config={attribute: True})
        await refused(call, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", name, features=name)

    async def test_a_missing_compiler(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        with closing(make_forkserver()) as forkserver:
            async with serve_compiler(home, planning=PlanningPool(forkserver)) as (client, _):
                await refused(client.compile(), "FAILED_PRECONDITION", "TOOLCHAIN_MISSING")
                await client.compile(optimization_level=pb.OPTIMIZATION_LEVEL_O0)

    async def test_a_path_that_leaves_the_roots(self, client: Client, home: Path) -> None:
        write_checkpoint(home / "elsewhere")
        (home / "models" / "link").symlink_to(home / "elsewhere")
        for model in ("..", "../elsewhere", "/etc", "tiny/../../elsewhere", "link"):
            how = expect(await refusal(client.compile(model=model)), "PERMISSION_DENIED", "PATH_OUTSIDE_MODEL_ROOTS")
            assert f"a directory below {home / 'models'}" in how.message
            assert "--model-root DIR" in how.message
            assert ("a link that leads outside" in how.message) == (model == "link")

    async def test_a_missing_checkpoint_says_how_to_get_one(self, client: Client, home: Path) -> None:
        for model, advised in (("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"), ("missing", "OWNER/NAME")):
            how = await refusal(client.compile(model=model))
            assert f"`kiln pull {advised} --model-root {home / 'models'}`" in how.message

    async def test_checkpoints_that_are_not_built(self, client: Client, home: Path) -> None:
        models = home / "models"
        weights = write_checkpoint(models / "short") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        leaving = write_checkpoint(models / "leaving") / "model.safetensors"
        leaving.rename(home / "outside.safetensors")
        leaving.symlink_to(home / "outside.safetensors")
        write_checkpoint(models / "odd", hidden_size=64)
        write_checkpoint(models / "bert", architectures=["BertModel"])
        write_checkpoint(models / "quarter", dtype="float8_e4m3fn")
        for model, reason, told in (
            ("short", "CHECKPOINT_INVALID", "model.safetensors"),
            ("leaving", "CHECKPOINT_INVALID", "model.safetensors"),
            ("odd", "CHECKPOINT_INVALID", ""),
            ("bert", "FEATURE_NOT_SERVED", ""),
            ("quarter", "FEATURE_NOT_SERVED", "got 'float8_e4m3fn' from the checkpoint; accepted: 'float32' or"),
        ):
            how = await refusal(client.compile(model=model))
            assert (how.code.name, how.reason) == ("INVALID_ARGUMENT", reason), model
            assert told in f"{how.message} {how.fields.get('neuron_config.torch_dtype')}"

    async def test_an_operation_that_is_not_there(self, client: Client) -> None:
        for name in ("operations/none", "none", ""):
            for call in (
                client.compiler.WatchCompile(pb.WatchCompileRequest(operation=name)),
                client.operations.GetOperation(operations_pb2.GetOperationRequest(name=name)),
                client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=name)),
                client.operations.DeleteOperation(operations_pb2.DeleteOperationRequest(name=name)),
                client.operations.WaitOperation(operations_pb2.WaitOperationRequest(name=name)),
            ):
                await refused(call, "NOT_FOUND", "OPERATION_NOT_FOUND")


class TestRequestId:
    async def test_calls_at_the_same_time_have_one_operation(self, client: Client) -> None:
        operations = await asyncio.gather(*(client.compile(request_id="r") for _ in range(8)))
        assert len({operation.name for operation in operations}) == 1


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
        runner.error = LoweringFailed("token_generation_16", "SIGSEGV")
        operation = await client.finish(await client.compile(salt="fails"))
        (event,) = await client.watch(operation.name)
        assert event.error == operation.error
        how = await client.fail(operation, "INTERNAL", "LOWERING_FAILED")
        assert how.metadata["tag"] == "token_generation_16"


class TestWait:
    async def test_it_returns_after_the_timeout_and_before_the_deadline(self, client: Client) -> None:
        operation = await client.compile()
        request = operations_pb2.WaitOperationRequest(name=operation.name, timeout=Duration(nanos=200_000_000))
        start = time.monotonic()
        with running_time() as taken:
            assert not (await client.operations.WaitOperation(request)).done
        assert time.monotonic() - start > 0.15
        assert taken.s < 2
        request = operations_pb2.WaitOperationRequest(name=operation.name)
        assert not (await client.operations.WaitOperation(request, timeout=1)).done

    async def test_any_timeout_is_taken(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        operation = await client.finish(await client.compile())
        for seconds in (-1, 315_576_000_000):
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

    async def test_a_list_that_makes_no_sense(self, client: Client) -> None:
        for field, value, reason in (("filter", "name=x", "FILTER_INVALID"), ("page_token", "x", "PAGE_TOKEN_INVALID")):
            request = operations_pb2.ListOperationsRequest(**{field: value})
            await refused(client.operations.ListOperations(request), "INVALID_ARGUMENT", reason)

    async def test_deleting_forgets_what_is_finished(self, client: Client, runner: DirectedRunner) -> None:
        operation = await client.compile()
        request = operations_pb2.DeleteOperationRequest(name=operation.name)
        await refused(client.operations.DeleteOperation(request), "FAILED_PRECONDITION", "OPERATION_NOT_DONE")
        runner.is_open.set()
        await client.finish(operation)
        await client.operations.DeleteOperation(request)
        assert (await refusal(client.get(operation.name))).reason == "OPERATION_NOT_FOUND"


class TestEnds:
    async def test_a_running_build_ends_and_can_be_had_again(self, client: Client, runner: DirectedRunner) -> None:
        operations = [await client.compile(name=name) for name in ("tiny", "same")]
        await client.reach_build(*operations)
        await asyncio.gather(*(client.cancel(operation.name) for operation in operations * 3))
        for operation in operations:
            await client.fail(operation, "CANCELLED", "COMPILE_CANCELLED", operation=operation.name)
        assert runner.cancelled == 1
        runner.is_open.set()
        response = await client.build()
        assert (response.version, response.cache) == (1, pb.CACHE_RESULT_MISS)

    async def test_a_finished_operation_stays_as_it_is(self, client: Client, runner: DirectedRunner) -> None:
        runner.is_open.set()
        operation = await client.finish(await client.compile())
        await client.cancel(operation.name)
        assert await client.get(operation.name) == operation

    async def test_failures_are_named_and_not_cached_and_unexpected_ones_tell_no_secrets(
        self, client: Client, runner: DirectedRunner
    ) -> None:
        runner.is_open.set()
        for error in (ValueError("no such part: /secret/part"), BuildFailed("out of memory")):
            runner.error = error
            how = await client.fail(await client.compile(), "INTERNAL", "BUILD_FAILED")
            assert "secret" not in how.message
        runner.error = None
        response = await client.build()
        assert (response.version, response.cache) == (1, pb.CACHE_RESULT_MISS)
