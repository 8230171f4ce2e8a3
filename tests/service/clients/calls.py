"""One call of every method of every client: what is scripted, what goes over the wire, what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2
from kiln.runtime.v1 import generation_pb2, runtime_pb2
from kiln_client import chat, compile_request, plan_request

from tests.servers import responses as samples

CHAT = chat([{"role": "user", "content": "hi"}])
COMPILE = compile_request("tiny", "models/tiny", {"neuron_config": {"seq_len": 8}}, optimization_level=0)
PLAN = plan_request(
    "models/tiny", {"neuron_config": {"seq_len": 8}}, target="trn1", core_memory_bytes=1 << 34, check_graphs=True
)
SHARD = compiler_pb2.ShardWeightsRequest(
    name="pirate", model="models/pirate", executables_ref="tiny:v1", request_id="r", skip_cache_lookup=True
)
WATCH = compiler_pb2.WatchCompileRequest(operation="operations/7")
WATCHING = [samples.watch_progress("TRACE"), samples.watch_result()]
BLOBS = [bundle_pb2.ReadBlobResponse(data=b"ab"), bundle_pb2.ReadBlobResponse(data=b"c")]
LOADING = [
    runtime_pb2.LoadBundleResponse(progress=samples.load_progress("VERIFY", 1, 2)),
    runtime_pb2.LoadBundleResponse(deployment=samples.deployment()),
]
WEIGHTS = runtime_pb2.LoadWeightsResult(deployment=samples.deployment(), previous_weight_epoch=1, weight_epoch=2)
SWAPPING = [
    runtime_pb2.LoadWeightsResponse(progress=samples.load_progress("SWAP")),
    runtime_pb2.LoadWeightsResponse(result=WEIGHTS),
]
RECEIPT = runtime_pb2.ResetKVCacheResponse(zeroed_bytes=5)
REFUSE = runtime_pb2.IN_FLIGHT_POLICY_REFUSE


@dataclass(frozen=True)
class Case:
    """One call: what is scripted, what is called, what the server must have received and the caller got."""

    rpc: str
    answer: Any
    method: str
    arguments: tuple[Any, ...]
    request: Message
    result: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method}-{self.rpc}"


COMPILER_CASES = [
    Case("Compile", samples.OPERATION, "start_compile", (COMPILE,), COMPILE, samples.OPERATION),
    Case("PlanCompile", samples.plan(), "plan_compile", (PLAN,), PLAN, samples.plan()),
    Case("WatchCompile", WATCHING, "watch_compile", ("operations/7",), WATCH, WATCHING),
    Case("WatchCompile", WATCHING, "compile", (COMPILE,), WATCH, samples.watch_result().result),
    Case("WatchCompile", WATCHING, "wait_compile", ("operations/7",), WATCH, samples.watch_result().result),
    Case(
        "ShardWeights",
        samples.OPERATION,
        "start_shard_weights",
        ("pirate", "models/pirate", "tiny:v1"),
        SHARD,
        samples.OPERATION,
        {"request_id": "r", "skip_cache_lookup": True},
    ),
    Case(
        "ShardWeights",
        samples.OPERATION,
        "shard_weights",
        ("pirate", "models/pirate", "tiny:v1"),
        SHARD,
        samples.watch_result().result,
        {"request_id": "r", "skip_cache_lookup": True},
    ),
    Case(
        "GetOperation",
        samples.OPERATION,
        "get_operation",
        ("operations/7",),
        operations_pb2.GetOperationRequest(name="operations/7"),
        samples.OPERATION,
    ),
    Case(
        "ListOperations",
        operations_pb2.ListOperationsResponse(operations=[samples.OPERATION]),
        "list_operations",
        (),
        operations_pb2.ListOperationsRequest(name="operations"),
        [samples.OPERATION],
    ),
    Case(
        "CancelOperation",
        Empty(),
        "cancel_operation",
        ("operations/7",),
        operations_pb2.CancelOperationRequest(name="operations/7"),
        None,
    ),
]
BUNDLE_CASES = [
    Case(
        "GetBundle",
        bundle_pb2.GetBundleResponse(bundle=samples.bundle()),
        "get_bundle",
        ("tiny@prod",),
        bundle_pb2.GetBundleRequest(ref="tiny@prod"),
        samples.bundle(),
    ),
    Case(
        "ListBundles",
        bundle_pb2.ListBundlesResponse(bundles=[samples.bundle()]),
        "list_bundles",
        ("tiny",),
        bundle_pb2.ListBundlesRequest(name="tiny"),
        [samples.bundle()],
    ),
    Case(
        "DeleteBundle",
        bundle_pb2.DeleteBundleResponse(deleted_blob_count=2),
        "delete_bundle",
        ("tiny:v1",),
        bundle_pb2.DeleteBundleRequest(ref="tiny:v1"),
        bundle_pb2.DeleteBundleResponse(deleted_blob_count=2),
    ),
    Case(
        "SetBundleOwner",
        bundle_pb2.SetBundleOwnerResponse(former_owner="alice"),
        "set_owner",
        ("tiny", "bob"),
        bundle_pb2.SetBundleOwnerRequest(name="tiny", owner="bob"),
        "alice",
    ),
    Case(
        "ReadBlob",
        BLOBS,
        "read_blob",
        (samples.DIGEST,),
        bundle_pb2.ReadBlobRequest(digest=samples.DIGEST, offset_bytes=4, ref="tiny:v1"),
        BLOBS,
        {"offset_bytes": 4, "ref": "tiny:v1"},
    ),
    Case(
        "SetAlias",
        bundle_pb2.SetAliasResponse(alias=bundle_pb2.Alias(name="tiny", alias="prod", version=2, etag="b")),
        "set_alias",
        ("tiny:v2", "prod"),
        bundle_pb2.SetAliasRequest(ref="tiny:v2", alias="prod", etag="a", require_compatible=True),
        bundle_pb2.SetAliasResponse(alias=bundle_pb2.Alias(name="tiny", alias="prod", version=2, etag="b")),
        {"etag": "a", "require_compatible": True},
    ),
    Case(
        "DeleteAlias",
        bundle_pb2.DeleteAliasResponse(),
        "delete_alias",
        ("tiny", "prod"),
        bundle_pb2.DeleteAliasRequest(name="tiny", alias="prod"),
        None,
    ),
    Case(
        "ListAliases",
        bundle_pb2.ListAliasesResponse(aliases=[bundle_pb2.Alias(alias="prod")]),
        "list_aliases",
        (),
        bundle_pb2.ListAliasesRequest(),
        [bundle_pb2.Alias(alias="prod")],
    ),
    Case(
        "LeaseBundle",
        bundle_pb2.LeaseBundleResponse(lease=samples.LEASE),
        "lease_bundle",
        ("tiny@prod", "runtime/host-1"),
        bundle_pb2.LeaseBundleRequest(ref="tiny@prod", holder="runtime/host-1", duration=samples.seconds(90.5)),
        samples.LEASE,
        {"duration_s": 90.5},
    ),
    Case(
        "ReleaseLease",
        bundle_pb2.ReleaseLeaseResponse(released_count=2),
        "release_lease",
        ("runtime/host-1", samples.DIGEST),
        bundle_pb2.ReleaseLeaseRequest(holder="runtime/host-1", digest=samples.DIGEST),
        2,
    ),
    Case(
        "ListLeases",
        bundle_pb2.ListLeasesResponse(leases=[samples.LEASE]),
        "list_leases",
        (),
        bundle_pb2.ListLeasesRequest(),
        [samples.LEASE],
    ),
    Case(
        "CollectGarbage",
        samples.COLLECTED,
        "collect_garbage",
        (),
        bundle_pb2.CollectGarbageRequest(dry_run=True, max_cache_age=samples.seconds(60)),
        samples.COLLECTED,
        {"dry_run": True, "max_cache_age_s": 60},
    ),
    Case(
        "ImportBundle",
        samples.importing(),
        "import_bundle",
        ("/import/store", "tiny"),
        bundle_pb2.ImportBundleRequest(
            layout="/import/store", source_ref="stable", name="tiny", alias="prod", alias_etag=""
        ),
        samples.importing()[-1].result,
        {"source_ref": "stable", "alias": "prod", "alias_etag": ""},
    ),
]
RUNTIME_CASES = [
    Case(
        "Generate",
        samples.generation(),
        "generate",
        ("demo", CHAT),
        generation_pb2.GenerateRequest(
            deployment_id="demo", chat=CHAT, sampling={"seed": 3}, stop={}, output={}, request_id="r"
        ),
        samples.generation(),
        {"seed": 3, "request_id": "r", "timeout_s": 9.0},
    ),
    Case(
        "Abort",
        generation_pb2.AbortResponse(outcome=generation_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED),
        "abort",
        ("demo", "r"),
        generation_pb2.AbortRequest(deployment_id="demo", request_id="r"),
        "already_finished",
    ),
    Case(
        "Tokenize",
        generation_pb2.TokenizeResponse(token_ids=[1, 2]),
        "tokenize",
        ("demo", "hi"),
        generation_pb2.TokenizeRequest(deployment_id="demo", text="hi"),
        [1, 2],
    ),
    Case(
        "Tokenize",
        generation_pb2.TokenizeResponse(token_ids=[1, 2]),
        "tokenize",
        ("demo", CHAT),
        generation_pb2.TokenizeRequest(deployment_id="demo", chat=CHAT),
        [1, 2],
    ),
    Case(
        "Detokenize",
        generation_pb2.DetokenizeResponse(text="hi"),
        "detokenize",
        ("demo", [1]),
        generation_pb2.DetokenizeRequest(deployment_id="demo", token_ids=[1], skip_special_tokens=False),
        "hi",
        {"skip_special_tokens": False},
    ),
    Case(
        "LoadBundle",
        LOADING,
        "load_bundle",
        ("tiny@prod", "demo"),
        runtime_pb2.LoadBundleRequest(
            ref="tiny@prod",
            deployment_id="demo",
            cores=[1],
            threads_per_core=4,
            follow_alias=True,
            target_inter_token_latency=Duration(nanos=250_000_000),
        ),
        samples.deployment(),
        {"cores": [1], "threads_per_core": 4, "follow_alias": True, "target_inter_token_latency_s": 0.25},
    ),
    Case(
        "UnloadBundle",
        runtime_pb2.UnloadBundleResponse(aborted_requests=2),
        "unload_bundle",
        ("demo",),
        runtime_pb2.UnloadBundleRequest(deployment_id="demo", in_flight_policy=REFUSE),
        runtime_pb2.UnloadBundleResponse(aborted_requests=2),
        {"in_flight": "refuse"},
    ),
    Case(
        "LoadWeights",
        SWAPPING,
        "load_weights",
        ("demo", "pirate"),
        runtime_pb2.LoadWeightsRequest(
            deployment_id="demo",
            ref="pirate",
            role=runtime_pb2.ROLE_DRAFT,
            in_flight_policy=runtime_pb2.IN_FLIGHT_POLICY_CONTINUE,
            kv_policy=runtime_pb2.KV_POLICY_KEEP,
        ),
        WEIGHTS,
        {"role": "draft", "in_flight": "continue", "kv": "keep"},
    ),
    Case(
        "ResetKVCache",
        RECEIPT,
        "reset_kv_cache",
        ("demo",),
        runtime_pb2.ResetKVCacheRequest(deployment_id="demo"),
        RECEIPT,
    ),
    Case(
        "ListSessions",
        runtime_pb2.ListSessionsResponse(sessions=[runtime_pb2.Session(id="s")]),
        "list_sessions",
        ("demo",),
        runtime_pb2.ListSessionsRequest(deployment_id="demo"),
        [runtime_pb2.Session(id="s")],
    ),
    Case(
        "ListDeployments",
        runtime_pb2.ListDeploymentsResponse(deployments=[samples.deployment()]),
        "list_deployments",
        (),
        runtime_pb2.ListDeploymentsRequest(),
        [samples.deployment()],
    ),
    Case(
        "GetDeployment",
        runtime_pb2.GetDeploymentResponse(deployment=samples.deployment()),
        "get_deployment",
        ("demo",),
        runtime_pb2.GetDeploymentRequest(deployment_id="demo"),
        samples.deployment(),
    ),
    Case(
        "GetServerInfo",
        runtime_pb2.GetServerInfoResponse(version="1"),
        "get_server_info",
        (),
        runtime_pb2.GetServerInfoRequest(),
        runtime_pb2.GetServerInfoResponse(version="1"),
    ),
]
