"""Which deployments a principal may use, on a whole runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime
from kiln.runtime.v1 import runtime_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as engine
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from tests.hang_guard import until
from tests.servers.logs import Logs, finished_calls
from tests.servers.refusals import refusal, refused
from tests.servers.runtime import Metadata, Runtime, serve_runtime, token_request
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks
from tests.servers.vllm_engine import make_request, stub_of

KEY = SigningKey()


def allow(scope: str, *deployments: str) -> Metadata:
    return bearer(KEY.sign(make_claims(scope, kiln_deployments=list(deployments))))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime that verifies tokens, with deployments `chat` and `code`."""
    jwks = write_jwks(tmp_path / "jwks.json", [KEY])
    options = (f"--auth-jwks={jwks}", "--engine-deployment=chat", "--gateway-address=127.0.0.1:0")
    async with serve_runtime(tmp_path, *options, "--engine-adapter=pirate=127.0.0.1:0") as started:
        await started.deploy("chat")
        await started.deploy("code")
        yield started


CALLS: dict[str, Any] = {
    "Generate": token_request([1, 2], deployment_id="code"),
    "Embed": generation.EmbedRequest(deployment_id="code"),
    "Abort": generation.AbortRequest(deployment_id="code", request_id="a"),
    "Tokenize": generation.TokenizeRequest(deployment_id="code", text="a"),
    "Detokenize": generation.DetokenizeRequest(deployment_id="code", token_ids=[1]),
    "LoadBundle": runtime.LoadBundleRequest(deployment_id="code", ref="story"),
    "UnloadBundle": runtime.UnloadBundleRequest(deployment_id="code"),
    "LoadWeights": runtime.LoadWeightsRequest(deployment_id="code", ref="story"),
    "LoadAdapter": runtime.LoadAdapterRequest(deployment_id="code", ref="story"),
    "UnloadAdapter": runtime.UnloadAdapterRequest(deployment_id="code", name="a"),
    "ListAdapters": runtime.ListAdaptersRequest(deployment_id="code"),
    "ResetKVCache": runtime.ResetKVCacheRequest(deployment_id="code"),
    "GetDeployment": runtime.GetDeploymentRequest(deployment_id="code"),
}


async def call(served: Runtime, method: str, request: Any, metadata: Metadata) -> None:
    service = served.generation if hasattr(served.generation, method) else served.control
    started = getattr(service, method)(request, metadata=metadata)
    if hasattr(started, "__aiter__"):
        async for _ in started:
            pass
    else:
        await started


async def test_another_deployment_is_forbidden(served: Runtime, logs: Logs) -> None:
    metadata = allow("infer load", "chat*")
    for method, request in CALLS.items():
        logs.clear()
        how = await refused(call(served, method, request, metadata), "PERMISSION_DENIED", "DEPLOYMENT_FORBIDDEN")
        assert how.metadata == {"principal": "alice", "deployment": "code"}
        (line,) = [log for log in logs if log["event"] in {"refused", "allowed"}]
        assert (line["event"], line["principal"], line["deployment"]) == ("refused", "alice", "code"), method


async def test_an_absent_deployment_is_forbidden_like_any_other(served: Runtime) -> None:
    request = runtime.GetDeploymentRequest(deployment_id="absent")
    for metadata, code in ((allow("load", "chat"), "PERMISSION_DENIED"), (allow("load", "*"), "NOT_FOUND")):
        assert (await refusal(call(served, "GetDeployment", request, metadata))).code.name == code


async def test_what_the_patterns_admit_is_served(served: Runtime, logs: Logs) -> None:
    logs.clear()
    metadata = allow("infer load", "chat", "c?de")
    for method in ("Generate", "Tokenize", "GetDeployment", "ResetKVCache"):
        await call(served, method, CALLS[method], metadata)
    (line,) = [log for log in logs if log["event"] in {"refused", "allowed"}]
    assert (line["event"], line["deployment"]) == ("allowed", "code")
    assert line["method"].endswith("/ResetKVCache")


async def test_scopes_do_not_contain_each_other(served: Runtime) -> None:
    for scope, method in (("load admin compile promote", "Generate"), ("infer admin", "UnloadBundle")):
        assert (await refusal(call(served, method, CALLS[method], allow(scope, "*")))).reason == "SCOPE_MISSING"


async def test_lists_show_what_the_principal_may_use(served: Runtime) -> None:
    for patterns, visible in ((["*"], ["chat", "code"]), (["co*"], ["code"]), ([], [])):
        metadata = allow("infer", *patterns)
        listed = await served.control.ListDeployments(runtime.ListDeploymentsRequest(), metadata=metadata)
        assert [one.id for one in listed.deployments] == visible
        info = await served.control.GetServerInfo(runtime.GetServerInfoRequest(), metadata=metadata)
        assert [one.id for one in info.deployments] == visible


async def test_the_engine_api_is_bound_to_the_deployment_that_it_speaks_for(served: Runtime) -> None:
    stub = stub_of(served)
    info = engine.GetModelInfoRequest()
    assert (await stub.GetModelInfo(info, metadata=allow("infer", "chat"))).served_model_name == "chat"
    for metadata, reason in (
        (allow("infer", "code"), "DEPLOYMENT_FORBIDDEN"),
        (allow("load", "chat"), "SCOPE_MISSING"),
    ):
        for method, request in ((stub.GetModelInfo, info), (stub.Generate, make_request([1, 2]))):
            assert (await refusal(method(request, metadata=metadata))).reason == reason
    await stub.HealthCheck(engine.HealthCheckRequest())


async def test_requests_of_the_engine_api_are_a_principals_own(served: Runtime) -> None:
    """As of Generate and Abort, whose ids they share."""
    stub = stub_of(served)
    alice, bob, root = (
        bearer(KEY.sign(make_claims(scope, sub=name)))
        for name, scope in (("alice", "infer"), ("bob", "infer"), ("root", "infer admin"))
    )
    chat = served.engine("chat")
    # No step ends, so that no request does.
    served.groups[0].gate.clear()
    readers = []
    for metadata in (alice, bob):
        started = stub.Generate(make_request([1, 2], request_id="mine"), metadata=metadata)
        readers.append(asyncio.create_task(anext(aiter(started))))
        await until(lambda: len(chat.requests) >= len(readers))
    again = served.generation.Generate(token_request([1], deployment_id="chat", request_id="mine"), metadata=alice)
    assert (await refusal(again)).reason == "REQUEST_ID_IN_USE"
    for metadata, left in ((bob, 1), (bob, 1), (root, 0)):
        await stub.Abort(engine.AbortRequest(request_ids=["mine"]), metadata=metadata)
        assert len(chat.requests) == left
    served.groups[0].gate.set()
    assert [(await reader).complete.finish_reason for reader in readers] == ["abort"] * 2


async def test_who_calls_at_the_gateways_address_may_infer_and_no_more(served: Runtime, logs: Logs) -> None:
    logs.clear()
    unload = runtime.UnloadBundleRequest(deployment_id="code")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.edge.local_port}") as channel:
        parts = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(make_request([1, 2]))
        assert [part async for part in parts][-1].HasField("complete")
        # A token does not count here: all who reach the address are one.
        for metadata in ((), allow("load infer", "*")):
            control = runtime_pb2_grpc.RuntimeServiceStub(channel)
            how = await refusal(control.UnloadBundle(unload, metadata=metadata))
            assert (how.reason, how.metadata["principal"]) == ("SCOPE_MISSING", "gateway")
    assert [log["principal"] for log in logs if log["event"] == "refused"] == ["gateway", "gateway"]
    assert [line["principal"] for line in await finished_calls(logs, count=3)] == ["gateway"] * 3
    await call(served, "UnloadBundle", unload, ())


async def test_who_calls_at_the_address_of_an_adapter_is_the_gateway(served: Runtime, logs: Logs) -> None:
    (port,) = served.server.edge.side_ports
    logs.clear()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert (await stub.GetModelInfo(engine.GetModelInfoRequest())).served_model_name == "pirate"
        assert (await refusal(stub.StartProfile(common_pb2.StartProfileRequest()))).reason == "SCOPE_MISSING"
    assert [line["principal"] for line in await finished_calls(logs, count=2)] == ["gateway"] * 2
