"""What vLLM's engine API tells routers over loopback, and the deployment that it speaks for."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import zipfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as runtime
from kiln.runtime.v1 import runtime_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

import runtime_svc.server
from edge.errors import OptionsInvalid
from runtime_svc.server import ENGINE_SERVICE
from runtime_svc.vllm_engine.archive import prepare_turns
from tests.bundles.published import CHAT_TEMPLATE, TOKENIZER_JSON
from tests.hang_guard import HANG_S
from tests.ranks.fakes import BIAS, EOS, VOCAB_SIZE, expected_tokens
from tests.servers.adapters import BASE, HOUSE, PROMPT, load_adapter, publish_adapter
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of
from tests.servers.vllm_engine import call, complete, make_request, stub_of


async def health_of(served: Runtime) -> tuple[bool, str]:
    """What both health services say of the API; a healthy one says so in both."""
    response = await stub_of(served).HealthCheck(pb.HealthCheckRequest())
    assert (await served.check_health(ENGINE_SERVICE) == "SERVING") is response.healthy
    return response.healthy, response.message


async def test_one_of_two_deployments_must_be_named(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        await refused(complete(served, [5]), "UNAVAILABLE", "ENGINE_NOT_SERVING")
        await served.deploy("a")
        await served.deploy("b", ref="other", bias=4)
        for method, request in [
            ("GetModelInfo", pb.GetModelInfoRequest()),
            ("GetServerInfo", pb.GetServerInfoRequest()),
            ("GetLoads", pb.GetLoadsRequest()),
            ("Abort", pb.AbortRequest()),
        ]:
            await refused(getattr(stub_of(served), method)(request), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_CHOSEN")
        caught = await refused(complete(served, [5]), "UNAVAILABLE", "ENGINE_NOT_SERVING")
        assert "several serve: a, b; --engine-deployment" in caught.message
        assert (await health_of(served))[0] is False
        await served.unload("a")
        assert list((await complete(served, [5])).output_ids) == expected_tokens([5], 5, bias=4)


async def test_the_named_deployment_answers(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--engine-deployment=b") as served:
        await served.deploy("a")
        await refused(complete(served, [5]), "UNAVAILABLE", "ENGINE_NOT_SERVING")
        assert await health_of(served) == (False, "no deployment 'b'")
        await served.deploy("b", ref="other", bias=4)
        assert list((await complete(served, [5])).output_ids) == expected_tokens([5], 5, bias=4)
        assert (await stub_of(served).GetModelInfo(pb.GetModelInfoRequest())).served_model_name == "b"
        assert await health_of(served) == (True, "deployment 'b' is READY")


async def test_an_address_speaks_for_an_adapter_alone(tmp_path: Path) -> None:
    adapters = [f"--engine-adapter={name}=127.0.0.1:0" for name in ("house", "pirate")]
    async with serve_runtime(tmp_path, *adapters) as served, AsyncExitStack() as stack:
        await served.deploy(adapters=HOUSE, **BASE)
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
            for port in served.server.edge.side_ports
        ]
        house, pirate = (vllm_engine_pb2_grpc.VllmEngineStub(channel) for channel in channels)

        async def ask(stub: Any) -> list[int]:
            (only,) = [part async for part in stub.Generate(make_request(PROMPT, stream=False))]
            return list(only.complete.output_ids)

        assert await ask(house) == expected_tokens(PROMPT, 5, bias=BIAS + 100)
        assert list((await complete(served, PROMPT)).output_ids) == expected_tokens(PROMPT, 5), "the model alone"
        names = [
            (await stub.GetModelInfo(pb.GetModelInfoRequest())).served_model_name
            for stub in (stub_of(served), house, pirate)
        ]
        assert names == ["d", "house", "pirate"]
        caught = await refused(ask(pirate), "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert caught.fields == {"adapter": "got 'pirate'; accepted: house"}
        publish_adapter(served, "swords", 7)
        await load_adapter(served, "swords")
        assert await ask(pirate) == expected_tokens(PROMPT, 5, bias=BIAS + 7)
        health = health_pb2_grpc.HealthStub(channels[0])
        checked = await health.Check(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await runtime_pb2_grpc.RuntimeServiceStub(channels[0]).GetServerInfo(runtime.GetServerInfoRequest())
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED

        served.ranks.step_s = 0.02
        running = house.Generate(make_request([5], max_tokens=40))
        await anext(aiter(running))
        served.ranks.gate.clear()
        drain = asyncio.create_task(served.server.drain())
        await served.wait_for_health("NOT_SERVING")
        await refused(ask(house), "UNAVAILABLE", "SHUTTING_DOWN")
        served.ranks.gate.set()
        assert [part async for part in running][-1].complete.finish_reason == "length"
        await drain
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await house.HealthCheck(pb.HealthCheckRequest())
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_health_is_that_of_the_deployment(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, f"--drain-timeout={2 * HANG_S}") as served:
        assert await health_of(served) == (False, "this API names no deployment, and none serves")
        await served.deploy()
        assert await health_of(served) == (True, "deployment 'd' is READY")
        served.load_gate.clear()
        served.ranks.die()
        await served.wait_for_state("RECOVERING")
        assert await health_of(served) == (False, "deployment 'd' is RECOVERING")
        served.load_gate.set()
        await served.wait_for_state("READY")
        assert (await health_of(served))[0] is True
        served.ranks.step_s = 0.02
        running = stub_of(served).Generate(make_request([5], max_tokens=40))
        await anext(aiter(running))
        served.ranks.gate.clear()
        drain = asyncio.create_task(served.server.drain())
        await served.wait_for_health("NOT_SERVING")
        for request in (stub_of(served).HealthCheck(pb.HealthCheckRequest()), complete(served, [5])):
            await refused(request, "UNAVAILABLE", "SHUTTING_DOWN")
        served.ranks.gate.set()
        assert [response async for response in running][-1].complete.finish_reason == "length"
        await drain


async def test_model_info_describes_the_deployment(served: Runtime) -> None:
    digest = served.publish()
    await served.deploy()
    info = await stub_of(served).GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model_path=digest,
        tokenizer_path=digest,
        served_model_name="d",
        is_generation=True,
        max_context_length=64,
        max_req_input_len=16,
        vocab_size=VOCAB_SIZE,
        architectures=["Test"],
        eos_token_ids=[EOS],
        bos_token_id=1,
        default_sampling_params_json='{"temperature": 0.0, "top_k": 0, "top_p": 1.0}',
    )


async def test_loads_and_server_info_count_requests(served: Runtime) -> None:
    await served.deploy()
    stub = stub_of(served)
    served.ranks.step_s = 0.02
    running = [asyncio.create_task(call(served, make_request([5, 6], max_tokens=40))) for _ in range(6)]
    await served.wait_for_slots(4)
    served.ranks.gate.clear()
    load = (await stub.GetLoads(pb.GetLoadsRequest())).loads[0]
    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (4, 2, 4)
    assert (load.utilization, load.max_total_num_tokens) == (1.0, 4 * 64)
    assert load.token_usage == load.num_used_tokens / (4 * 64) < 0.8, "a full batch of short sequences is no overload"
    assert load.num_waiting_uncached_tokens == 4
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.active_requests, info.is_paused) == ("kiln", 6, False)
    assert (info.max_num_seqs, info.block_size, info.data_parallel_size) == (4, 64, 1)
    assert info.kv_cache_dtype == "float32"
    served.ranks.gate.set()
    for one in running:
        one.cancel()
    await served.wait_for_slots(0)
    loads = await stub.GetLoads(pb.GetLoadsRequest(dp_rank=0, include=["core", "queues"]))
    assert (loads.dp_rank_count, len(loads.loads), loads.loads[0].num_total_reqs) == (1, 1, 0)
    await refused(stub.GetLoads(pb.GetLoadsRequest(dp_rank=1)), "INVALID_ARGUMENT", "REQUEST_INVALID", "dp_rank")


async def fetch_tokenizer(served: Runtime) -> tuple[list[common_pb2.GetTokenizerChunk], bytes]:
    chunks = [chunk async for chunk in stub_of(served).GetTokenizer(common_pb2.GetTokenizerRequest())]
    return chunks, b"".join(chunk.data for chunk in chunks)


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(served: Runtime) -> None:
    # Too random to fit one message.
    template = CHAT_TEMPLATE + "{#" + random.Random(0).randbytes(100_000).hex() + "#}"
    await served.deploy(chat_template=template, chat_templates={"tool_use": "tools", "../x": "elsewhere"})
    chunks, data = await fetch_tokenizer(served)
    assert len(chunks) > 1
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}, "equal bytes at any time"
    assert files == {
        "tokenizer.json": TOKENIZER_JSON,
        "chat_template.jinja": prepare_turns(template),
        "additional_chat_templates/tool_use.jinja": prepare_turns("tools"),
        "additional_chat_templates/0.jinja": prepare_turns("elsewhere"),
        "config.json": b"{}",
        "generation_config.json": b'{"eos_token_id": [2]}',
    }
    assert (await fetch_tokenizer(served))[1] == data
    await served.unload()
    await served.deploy(tokenizer=None)
    await refused(fetch_tokenizer(served), "UNIMPLEMENTED", "METHOD_NOT_SERVED")


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
async def test_other_methods_are_refused_by_name(served: Runtime, method: str, request_: Any) -> None:
    caught = await refused(getattr(stub_of(served), method)(request_), "UNIMPLEMENTED", "METHOD_NOT_SERVED")
    assert caught.message.startswith(f"{method} is not served: ")


async def test_without_the_extra_the_runtime_serves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_svc.server, "find_spec", lambda _: None)
    async with serve_runtime(tmp_path) as served:
        await served.deploy()
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(served).HealthCheck(pb.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(OptionsInvalid, match="engine-deployment: got 'd'; accepted: unset without the extra"):
        async with serve_runtime(tmp_path / "other", "--engine-deployment=d"):
            pass
    with pytest.raises(OptionsInvalid, match="engine-adapter: got 'a=localhost:0'; accepted: unset"):
        async with serve_runtime(tmp_path / "another", "--engine-adapter=a=localhost:0"):
            pass
