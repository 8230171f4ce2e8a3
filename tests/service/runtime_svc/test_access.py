"""Which deployments a principal may use, on a whole runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime
from kiln.runtime.v1 import runtime_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as engine
from smg_grpc_proto import vllm_engine_pb2_grpc
from structlog.testing import capture_logs

from tests.servers.runtime import Runtime, details_of, serve_runtime, token_request
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks
from tests.servers.vllm_engine import make_request, stub_of

KEY = SigningKey()
Metadata = tuple[tuple[str, str], ...]


def allow(scope: str, *deployments: str) -> Metadata:
    return bearer(KEY.sign(make_claims(scope, kiln_deployments=list(deployments))))


@pytest.fixture
def logs() -> Iterator[list[dict[str, Any]]]:
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime that verifies tokens, with deployments `chat` and `code`."""
    jwks = write_jwks(tmp_path / "jwks.json", [KEY])
    options = (f"--auth-jwks={jwks}", "--engine-deployment=chat", "--gateway-address=127.0.0.1:0")
    async with serve_runtime(tmp_path, *options) as started:
        await started.deploy("chat")
        await started.deploy("code")
        yield started


CALLS: dict[str, Any] = {
    "Generate": token_request([1, 2], deployment_id="code"),
    "Abort": generation.AbortRequest(deployment_id="code", request_id="a"),
    "Tokenize": generation.TokenizeRequest(deployment_id="code", text="a"),
    "Detokenize": generation.DetokenizeRequest(deployment_id="code", token_ids=[1]),
    "LoadBundle": runtime.LoadBundleRequest(deployment_id="code", ref="story"),
    "UnloadBundle": runtime.UnloadBundleRequest(deployment_id="code"),
    "LoadWeights": runtime.LoadWeightsRequest(deployment_id="code", ref="story"),
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


@pytest.mark.parametrize("method", list(CALLS))
async def test_another_deployment_is_forbidden(served: Runtime, logs: list[dict[str, Any]], method: str) -> None:
    logs.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(served, method, CALLS[method], allow("infer load", "chat*"))
    info, _ = details_of(caught.value)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert (info.reason, dict(info.metadata)) == (
        "DEPLOYMENT_FORBIDDEN",
        {"principal": "alice", "deployment": "code"},
    )
    (line,) = [log for log in logs if log["event"] in {"refused", "allowed"}]
    assert (line["event"], line["principal"], line["deployment"]) == ("refused", "alice", "code")


async def test_an_absent_deployment_is_forbidden_like_any_other(served: Runtime) -> None:
    request = runtime.GetDeploymentRequest(deployment_id="absent")
    for metadata, code in ((allow("load", "chat"), "PERMISSION_DENIED"), (allow("load", "*"), "NOT_FOUND")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(served, "GetDeployment", request, metadata)
        assert caught.value.code().name == code


async def test_what_the_patterns_admit_is_served(served: Runtime, logs: list[dict[str, Any]]) -> None:
    logs.clear()
    metadata = allow("infer load", "chat", "c?de")
    for method in ("Generate", "Tokenize", "GetDeployment", "ResetKVCache"):
        await call(served, method, CALLS[method], metadata)
    (line,) = [log for log in logs if log["event"] in {"refused", "allowed"}]
    assert (line["event"], line["deployment"]) == ("allowed", "code")
    assert line["method"].endswith("/ResetKVCache")


async def test_scopes_do_not_contain_each_other(served: Runtime) -> None:
    for scope, method in (("load admin compile promote", "Generate"), ("infer admin", "UnloadBundle")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(served, method, CALLS[method], allow(scope, "*"))
        assert details_of(caught.value)[0].reason == "SCOPE_MISSING"


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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(info, metadata=metadata)
        assert details_of(caught.value)[0].reason == reason
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(make_request([1, 2]), metadata=metadata)))
        assert details_of(caught.value)[0].reason == reason
    await stub.HealthCheck(engine.HealthCheckRequest())


async def test_who_calls_at_the_gateways_address_may_infer_and_no_more(
    served: Runtime, logs: list[dict[str, Any]]
) -> None:
    logs.clear()
    unload = runtime.UnloadBundleRequest(deployment_id="code")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.edge.local_port}") as channel:
        parts = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(make_request([1, 2]))
        assert [part async for part in parts][-1].HasField("complete")
        # A token does not count here: all who reach the address are one.
        for metadata in ((), allow("load infer", "*")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await runtime_pb2_grpc.RuntimeServiceStub(channel).UnloadBundle(unload, metadata=metadata)
            info, _ = details_of(caught.value)
            assert (info.reason, info.metadata["principal"]) == ("SCOPE_MISSING", "gateway")
    assert [log["principal"] for log in logs if log["event"] == "refused"] == ["gateway", "gateway"]
    assert [log["principal"] for log in logs if log["event"] == "call"] == ["gateway"] * 3
    await call(served, "UnloadBundle", unload, ())
