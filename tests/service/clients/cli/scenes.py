"""What the scripted server answers in each scene of a transcript, by method."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

from google.longrunning.operations_pb2 import ListOperationsResponse, Operation
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2
from kiln.runtime.v1 import generation_pb2, runtime_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import refusal

GIB: Final = 1 << 30
OTHER: Final = "sha256:" + "b" * 64

INFO: Final = runtime_pb2.GetServerInfoResponse(
    version="0.1.0",
    schema_revision=1,
    target="cpu",
    isas=["x86-64-v3"],
    total_cores=8,
    free_cores=7,
    total_memory_bytes=8_000_000,
    free_memory_bytes=3_000_000,
)


def _shown(deployment: runtime_pb2.Deployment) -> dict[str, Any]:
    return {
        "GetServerInfo": INFO,
        "GetDeployment": runtime_pb2.GetDeploymentResponse(deployment=deployment),
        "ListDeployments": runtime_pb2.ListDeploymentsResponse(deployments=[deployment]),
    }


def _in_a_container() -> dict[str, Any]:
    """Of a runtime that may take some of its host's cores."""
    info = runtime_pb2.GetServerInfoResponse(host_cores=range(24, 32))
    info.MergeFrom(INFO)
    return _shown(samples.deployment()) | {"GetServerInfo": info}


def _waiting() -> runtime_pb2.Deployment:
    deployment = samples.deployment()
    deployment.state = runtime_pb2.Deployment.STATE_AWAITING_WEIGHTS
    deployment.roles[0].weight_epoch = 0
    deployment.roles[0].weights_ref = ""
    return deployment


def _lagging() -> runtime_pb2.Deployment:
    deployment = samples.deployment(
        followed_alias="tiny@prod",
        degraded=True,
        followed_version="tiny:v4",
        followed_digest=OTHER,
        follow_message="tiny:v4 has another graph",
    )
    deployment.roles[0].weights_ref, deployment.roles[0].weights_version = "tiny@prod", "tiny:v2"
    return deployment


def _of_blocks(total: int) -> runtime_pb2.Deployment:
    """A deployment whose KV cache has so many blocks; 0 as of an earlier server, which counts none."""
    old = runtime_pb2.OldWeights(ref="tiny:v2", digest=OTHER, weight_epoch=1, active_requests=2, size_bytes=4_000_000)
    deployment = samples.deployment(old_weights=old if total else None)
    deployment.capabilities.prefix_caching = total > 2
    load = runtime_pb2.Load(
        used_slots=1, used_blocks=1, total_blocks=total, block_tokens=256, used_tokens=57, queued_tokens=9
    )
    deployment.load.MergeFrom(load)
    return deployment


def _capable() -> runtime_pb2.Deployment:
    deployment = samples.deployment(target_inter_token_latency=Duration(nanos=250_000_000))
    deployment.capabilities.MergeFrom(
        runtime_pb2.Capabilities(
            text=True,
            logprobs=True,
            max_logprobs=20,
            logits=True,
            max_num_sequences=4,
            input_truncation=True,
            padding_side="left",
            submodels=[
                runtime_pb2.SubmodelBuckets(submodel="context_encoding", batch_size=1, tokens=[64, 128]),
                runtime_pb2.SubmodelBuckets(submodel="token_generation", batch_size=2, tokens=[256]),
            ],
        )
    )
    return deployment


def _sessions() -> runtime_pb2.ListSessionsResponse:
    used = runtime_pb2.Session(id="used", held_tokens=7, running=True)
    idle = runtime_pb2.Session(id="idle", held_tokens=17)
    idle.last_use_time.FromSeconds(1_800_000_000)
    idle.expire_time.FromSeconds(1_800_000_060)
    return runtime_pb2.ListSessionsResponse(sessions=[idle, used])


def _adapters() -> dict[str, Any]:
    house = runtime_pb2.Adapter(name="house", digest=OTHER, bundle_digest=samples.DIGEST, slot=0, active_requests=3)
    pirate = runtime_pb2.Adapter(
        name="pirate", digest=samples.DIGEST, bundle_ref="pirate:v2", bundle_digest=OTHER, owner="alice"
    )
    deployment = samples.deployment()
    deployment.capabilities.adapters.append("house")
    deployment.capabilities.adapter_slots, deployment.load.adapters = 4, 2
    return {
        **_shown(deployment),
        "ListAdapters": runtime_pb2.ListAdaptersResponse(adapters=[house, pirate], num_slots=4),
        "LoadAdapter": runtime_pb2.LoadAdapterResponse(adapter=pirate),
        "UnloadAdapter": runtime_pb2.UnloadAdapterResponse(active_requests=1),
    }


def _operation(name: str, stage: str, **fields: Any) -> Operation:
    operation = Operation(name=name, **fields)
    number = compiler_pb2.CompileStage.Value(f"COMPILE_STAGE_{stage}")
    operation.metadata.Pack(compiler_pb2.CompileMetadata(name="tiny", stage=number))
    return operation


def _operations() -> ListOperationsResponse:
    done = _operation("operations/2", "DONE", done=True)
    done.response.Pack(samples.watch_result().result)
    failed = _operation("operations/3", "DONE", done=True, error=refusal("CANCELLED", "COMPILE_CANCELLED"))
    return ListOperationsResponse(operations=[_operation("operations/1", "LOWER"), done, failed])


def _contents(contents: str) -> dict[str, Any]:
    bundle = samples.bundle()
    bundle.contents = bundle_pb2.BundleContents.Value(f"BUNDLE_CONTENTS_{contents}")
    return {
        "ListBundles": bundle_pb2.ListBundlesResponse(bundles=[bundle]),
        "GetBundle": bundle_pb2.GetBundleResponse(bundle=bundle),
    }


def _too_large(**fields: Any) -> dict[str, Any]:
    """A plan that does not fit."""
    plan = samples.plan(fits=False, **fields)
    for rank in plan.ranks:
        rank.limit_bytes = 6 * GIB + GIB // 2
    return {"PlanCompile": plan}


def _findings() -> compiler_pb2.GraphCheck:
    place: dict[str, Any] = {
        "tag": "token_generation_128",
        "submodel": "token_generation",
        "bucket": compiler_pb2.Bucket(tokens=[128]),
    }
    return compiler_pb2.GraphCheck(
        num_graphs=2,
        num_findings=5,
        findings=[
            compiler_pb2.GraphFinding(
                **place,
                code="NCC_EVRF013",
                operation="sort sort.3 of s64[2,8]",
                accepted="floating-point keys",
                source="execution/sampling.py:80",
            ),
            compiler_pb2.GraphFinding(
                **place, operation="input seq_ids is missing", accepted="each that the submodel has, and each is used"
            ),
        ],
    )


_PIECES = (b"some ", b"graphs\n")
_CONFIG = '{"hidden_size": 64, "neuron_config": {"seq_len": 256, "lora_config": null}}'


def _files(*titles: str, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Files of equal bytes, and other ones, in a bundle and beside it."""
    data = b"".join(_PIECES)
    digest = f"sha256:{sha256(data).hexdigest()}"
    found = [bundle_pb2.Blob(digest=digest, size_bytes=len(data), title=title) for title in titles]
    found += [bundle_pb2.Blob(digest=samples.DIGEST, size_bytes=1, title=title) for title in others]
    bundle = samples.bundle(blobs=found[:1], referrers=found[1:])
    return {
        "GetBundle": bundle_pb2.GetBundleResponse(bundle=bundle),
        "ReadBlob": [bundle_pb2.ReadBlobResponse(data=piece) for piece in _PIECES],
    }


def _configured() -> dict[str, Any]:
    blob = bundle_pb2.Blob(digest=samples.DIGEST, size_bytes=len(_CONFIG), title="neuron_config.json")
    bundle = samples.bundle(manifest_json=f'{{"config": {_CONFIG}}}'.encode(), blobs=[blob])
    pieces = (_CONFIG[:10].encode(), _CONFIG[10:].encode())
    return {
        "GetBundle": bundle_pb2.GetBundleResponse(bundle=bundle),
        "ReadBlob": [bundle_pb2.ReadBlobResponse(data=piece) for piece in pieces],
    }


def _refused(method: str, *status: str, **details: Any) -> dict[str, Any]:
    return {method: refusal(*status, **details)}


def _generated(*events: Any) -> dict[str, Any]:
    return {"Generate": [samples.accepted(), *events]}


def _with_prompt() -> list[generation_pb2.GenerateResponse]:
    begin, *rest = samples.generation()
    told = generation_pb2.GenerateResponse(sequence_number=1, weight_epoch=1)
    told.prompt.text = "One day, "
    told.prompt.tokens.add(id=4, text="One", text_offset=0)
    told.prompt.tokens.add(id=6, text=" day, ", text_offset=3, logprob=-0.5)
    told.prompt.tokens[1].top_logprobs.add(id=7, text=" night, ", logprob=-0.25)
    for event in rest:
        event.sequence_number += 1
    rest[-1].finished.cumulative_logprob = -1.5
    return [begin, told, *rest]


def _cut() -> dict[str, Any]:
    scene = _generated(samples.finished(1))
    scene["Generate"][0].accepted.truncated_tokens = 7
    return scene


def _with_logits() -> dict[str, Any]:
    event = samples.delta(1, "a", 5, logprob=-0.25)
    event.delta.tokens[0].logits.extend([0.5, -1.25])
    return _generated(event, samples.finished(2))


def _checkpoint(*refusals: Any) -> dict[str, Any]:
    return {
        "Compile": (*refusals, samples.OPERATION),
        "PlanCompile": (*refusals, samples.plan()),
        "ShardWeights": (*refusals, samples.OPERATION),
        "WatchCompile": [compiler_pb2.WatchCompileResponse(result=_PIRATE)],
    }


_PIRATE = compiler_pb2.CompileResponse(name="pirate", version=1, digest=samples.DIGEST)
_REFUSALS = {
    "UNAUTHENTICATED": ("TOKEN_MISSING", "TOKEN_EXPIRED", "TOKEN_INVALID", "CERTIFICATE_REVOKED", "UNAUTHENTICATED"),
    "PERMISSION_DENIED": (
        *("SCOPE_MISSING", "DEPLOYMENT_FORBIDDEN", "ALIAS_FORBIDDEN"),
        *("PERMISSION_DENIED", "PATH_OUTSIDE_IMPORT_ROOTS"),
    ),
}
_NO_CHECKPOINT = refusal("NOT_FOUND", "CHECKPOINT_NOT_FOUND")
_DIED = refusal("UNAVAILABLE", "RANK_DIED", "rank 0 died", rank="0")
_GOING = refusal("UNAVAILABLE", "SHUTTING_DOWN", "it is shutting down")
_BLOB = bundle_pb2.Blob(digest=samples.DIGEST, size_bytes=10, media_type="application/x", title="weights.safetensors")
_ALIAS = bundle_pb2.Alias(name="tiny", alias="prod", version=3, etag="e2")
_CORRUPT = refusal("DATA_LOSS", "BLOB_CORRUPT", "blob x is corrupt", digest="x")
_RESOLVING = runtime_pb2.LoadBundleResponse(progress=samples.load_progress("RESOLVE"))
_LOADED = runtime_pb2.LoadBundleResponse(deployment=samples.deployment())
_VERIFYING = runtime_pb2.LoadBundleResponse(progress=samples.load_progress("VERIFY", 1_000_000, 4_000_000))
_SWAPPING = runtime_pb2.LoadWeightsResponse(progress=samples.load_progress("SWAP"))
_SWAPPED = runtime_pb2.LoadWeightsResult(
    deployment=samples.deployment(),
    previous_weight_epoch=1,
    weight_epoch=2,
    aborted_requests=1,
    pause_duration=samples.seconds(0.004),
)
_OTHER_GRAPH = refusal("FAILED_PRECONDITION", "GRAPH_ABI_MISMATCH", "other graph", expected="a")
_LOWERING = samples.watch_progress(
    "LOWER", executables_done=1, executables_total=2, eta=samples.seconds(12), message="token_generation_256"
)
_SHARDING = samples.watch_progress("SHARD", sharded_bytes=1_000_000, total_bytes=4_000_000)
_MISTAKES = [
    ("neuron_config.seq_lenn", "got 256; accepted: no such name, did you mean seq_len?"),
    ("neuron_config.batch_size", "got zero; accepted: an integer of at least 1"),
]
SCENES: Final[dict[str, dict[str, Any]]] = {
    **{
        f"the refusal {reason}": {"ResetKVCache": refusal(code, reason)}
        for code, reasons in _REFUSALS.items()
        for reason in reasons
    },
    "files of a bundle": _files("graphs.jsonl.gz", others=("weights",)),
    "two files of a title": _files("graphs.jsonl.gz", others=("graphs.jsonl.gz",)),
    "files of equal bytes": _files("LICENSE", "NOTICE"),
    "a file of other bytes": _files("graphs.jsonl.gz") | {"ReadBlob": [bundle_pb2.ReadBlobResponse(data=b"giraffe")]},
    "a configuration": _configured(),
    "no configuration": {"GetBundle": bundle_pb2.GetBundleResponse(bundle=samples.bundle())},
    "a runtime in a container": _in_a_container(),
    "a generation": {
        "Generate": samples.generation(),
        "Tokenize": generation_pb2.TokenizeResponse(token_ids=[1, 15, 4]),
    },
    "embeddings": {"Embed": generation_pb2.EmbedResponse(embeddings=[samples.EMBEDDING])},
    "a prompt before its answer": {"Generate": _with_prompt()},
    "several sequences": {"Generate": samples.several_sequences()},
    "a stop string": _generated(samples.finished(1, "STOP_STRING", stop_string="END")),
    "a stop token": _generated(samples.finished(1, "STOP_TOKEN", stop_token_id=2)),
    "the end of the time": _generated(samples.finished(1, "TIME")),
    "log probabilities and logits": _with_logits(),
    "a prompt that was cut": _cut(),
    "captured inputs": _generated(samples.finished(1, captured_inputs_path="/captures/d/r.safetensors")),
    "inputs that were not captured": _generated(
        samples.finished(1, capture_status=refusal("FAILED_PRECONDITION", "CAPTURE_UNWRITABLE", "disk full"))
    ),
    "a full queue": _refused("Generate", "RESOURCE_EXHAUSTED", "QUEUE_FULL", "64 requests wait", retry_after_s=0.5),
    "a request that is refused": _refused(
        "Generate", "INVALID_ARGUMENT", "REQUEST_INVALID", "bad", fields=[("sampling.temperature", "got -1")]
    ),
    "a failure halfway": _generated(samples.delta(1, "Once ", 11), samples.finished(2, "ERROR", status=_DIED), _DIED),
    "a generation that ends silently": _generated(samples.delta(1, "Once ", 11)),
    "a compiler that restarts": {
        "Compile": samples.OPERATION,
        "WatchCompile": (
            [samples.watch_progress("TRACE"), _GOING],
            [samples.watch_progress("TRACE"), compiler_pb2.WatchCompileResponse(result=_PIRATE)],
        ),
    },
    "a checkpoint": _checkpoint(),
    "a checkpoint that the compiler does not know by name": _checkpoint(_NO_CHECKPOINT),
    "an adapter that the compiler does not know by name": {
        "ShardAdapter": (refusal("NOT_FOUND", "ADAPTER_NOT_FOUND", "no"), samples.OPERATION),
        "WatchCompile": [compiler_pb2.WatchCompileResponse(result=_PIRATE)],
    },
    "a checkpoint that the compiler may not read": _checkpoint(
        _NO_CHECKPOINT, refusal("PERMISSION_DENIED", "PATH_OUTSIDE_MODEL_ROOTS")
    ),
    "a server": _shown(samples.deployment()),
    "nothing there": {
        "GetServerInfo": INFO,
        "ListDeployments": runtime_pb2.ListDeploymentsResponse(),
        "ListSessions": runtime_pb2.ListSessionsResponse(),
        "ListBundles": bundle_pb2.ListBundlesResponse(),
        "ListLeases": bundle_pb2.ListLeasesResponse(),
        "ListOperations": ListOperationsResponse(),
    },
    "a deployment that is quarantined": _shown(samples.deployment(message="rank 0 [died]")),
    "a deployment that awaits its weights": _shown(_waiting()),
    "a deployment that follows an alias": _shown(samples.deployment(followed_alias="tiny@prod")),
    "a deployment that cannot follow": _shown(_lagging()),
    "as many blocks as slots": _shown(_of_blocks(2)),
    "more blocks than slots": _shown(_of_blocks(64)),
    "blocks that are not counted": _shown(_of_blocks(0)),
    "a deployment that can do much": _shown(_capable()),
    "no such deployment": _refused("GetDeployment", "NOT_FOUND", "DEPLOYMENT_NOT_FOUND", "no deployment 'x'"),
    "a load": {"LoadBundle": [_RESOLVING, _VERIFYING, _LOADED]},
    "a load that fails": {"LoadBundle": [_VERIFYING, _CORRUPT]},
    "a load that ends silently": {"LoadBundle": [_VERIFYING]},
    "weights": {"LoadWeights": [_SWAPPING, runtime_pb2.LoadWeightsResponse(result=_SWAPPED)]},
    "weights of another graph": {"LoadWeights": _OTHER_GRAPH, "ShardWeights": _OTHER_GRAPH},
    "an end": {"UnloadBundle": runtime_pb2.UnloadBundleResponse(aborted_requests=2)},
    "a KV cache": {
        "ResetKVCache": runtime_pb2.ResetKVCacheResponse(
            affected_sequences=2,
            freed_slots=2,
            zeroed_bytes=1_000_000,
            weight_epoch=3,
            duration=samples.seconds(0.25),
            freed_blocks=1,
        )
    },
    "sessions": {"ListSessions": _sessions()},
    "adapters": _adapters(),
    "no room for adapters": {
        "ListAdapters": runtime_pb2.ListAdaptersResponse(),
        "LoadAdapter": refusal("FAILED_PRECONDITION", "ADAPTERS_UNSUPPORTED", "no room", deployment_id="demo"),
    },
    "bundles": {
        "ListBundles": bundle_pb2.ListBundlesResponse(bundles=[samples.bundle(3), samples.bundle(2)]),
        "GetBundle": bundle_pb2.GetBundleResponse(
            bundle=samples.bundle(manifest_json=b'{"abi_version": 1}', blobs=[_BLOB], referrers=[_BLOB])
        ),
        "DeleteBundle": bundle_pb2.DeleteBundleResponse(deleted_blob_count=4, deleted_size_bytes=99),
        "SetAlias": bundle_pb2.SetAliasResponse(alias=_ALIAS),
        "DeleteAlias": bundle_pb2.DeleteAliasResponse(),
    },
    "executables alone": _contents("EXECUTABLES"),
    "weights alone": _contents("WEIGHTS"),
    "a bundle without a version": {"GetBundle": bundle_pb2.GetBundleResponse(bundle=samples.bundle(0))},
    "an alias with warnings": {
        "SetAlias": bundle_pb2.SetAliasResponse(alias=_ALIAS, warnings=["tiny:v3 has graph ABI b"])
    },
    "an alias that does not fit": _refused(
        "SetAlias", "FAILED_PRECONDITION", "ALIAS_INCOMPATIBLE", "no", wanted="tiny:v3"
    ),
    "a bundle in use": _refused("DeleteBundle", "FAILED_PRECONDITION", "BUNDLE_IN_USE", "prod names it", alias="prod"),
    "leases": {
        "LeaseBundle": bundle_pb2.LeaseBundleResponse(lease=samples.LEASE),
        "ReleaseLease": bundle_pb2.ReleaseLeaseResponse(released_count=2),
        "ListLeases": bundle_pb2.ListLeasesResponse(leases=[samples.LEASE]),
    },
    "a lease that is refused": _refused(
        "LeaseBundle", "INVALID_ARGUMENT", "LEASE_INVALID", fields=[("duration", "got 90 days")]
    ),
    "garbage": {"CollectGarbage": samples.COLLECTED},
    "an import": {"ImportBundle": samples.importing()},
    "an import that is corrupt": {
        "ImportBundle": [samples.importing()[0], refusal("DATA_LOSS", "BLOB_CORRUPT", digest=samples.DIGEST)]
    },
    "operations": {
        "ListOperations": _operations(),
        "CancelOperation": Empty(),
        "WatchCompile": [samples.watch_progress("LOWER"), samples.watch_result()],
    },
    "no such operation": {
        "CancelOperation": refusal("NOT_FOUND", "OPERATION_NOT_FOUND"),
        "WatchCompile": [refusal("NOT_FOUND", "OPERATION_NOT_FOUND")],
    },
    "a compile": {
        "Compile": samples.OPERATION,
        "WatchCompile": [samples.watch_progress("TRACE"), _LOWERING, _SHARDING, samples.watch_result()],
    },
    "a compile that is cached": {"Compile": samples.OPERATION, "WatchCompile": [samples.watch_result("HIT")]},
    "a compile that fails": {
        "Compile": samples.OPERATION,
        "WatchCompile": [
            samples.watch_progress("LOWER"),
            compiler_pb2.WatchCompileResponse(error=refusal("INTERNAL", "LOWERING_FAILED", "g++ failed")),
        ],
    },
    "mistakes": _refused("Compile", "INVALID_ARGUMENT", "CONFIG_INVALID", "2 mistakes [in] all", fields=_MISTAKES),
    "mistakes that the message repeats": _refused(
        "Compile", "INVALID_ARGUMENT", "CONFIG_INVALID", "; ".join(map(": ".join, _MISTAKES)), fields=_MISTAKES
    ),
    "shards": {
        "ShardWeights": samples.OPERATION,
        "ShardAdapter": samples.OPERATION,
        "WatchCompile": [_SHARDING, compiler_pb2.WatchCompileResponse(result=_PIRATE)],
    },
    "a quantized checkpoint": {
        "QuantizeWeights": samples.OPERATION,
        "WatchCompile": [_SHARDING, samples.watch_quantized()],
    },
    "an output that exists": _refused("QuantizeWeights", "ALREADY_EXISTS", "OUTPUT_EXISTS", "m8 exists"),
    "a plan": {"PlanCompile": samples.plan()},
    "a plan for more cores": _too_large(cores_needed=8, largest=compiler_pb2.LargestSizes(seq_len=4096)),
    "a plan for more cores or fewer blocks": _too_large(
        cores_needed=8, largest=compiler_pb2.LargestSizes(batch_size=2, pa_num_blocks=5)
    ),
    "a plan for no number of cores": _too_large(cores_needed=0, largest=None),
    "a plan with findings": {"PlanCompile": samples.plan(graph_check=_findings())},
    "a plan without findings": {"PlanCompile": samples.plan(graph_check=compiler_pb2.GraphCheck(num_graphs=2))},
    "no checkpoint": {"PlanCompile": _NO_CHECKPOINT},
}
