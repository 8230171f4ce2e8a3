"""One call of every method of every client: what is scripted, what goes over the wire, what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.longrunning.operations_pb2 import ListOperationsResponse
from google.protobuf import text_format
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from kiln.bundle.v1 import bundle_pb2
from kiln.runtime.v1 import generation_pb2, runtime_pb2
from kiln_client import chat, compile_request, plan_request

from tests.servers import responses as samples

CHAT = chat([{"role": "user", "content": "hi"}])
CONFIG = {"neuron_config": {"seq_len": 8}}
COMPILE = compile_request("tiny", "models/tiny", CONFIG, optimization_level=0)
PLAN = plan_request("models/tiny", CONFIG, target="trn1", core_memory_bytes=1 << 34, check_graphs=True)
PIRATE = ("pirate", "models/pirate", "tiny:v1")
WATCHING = [samples.watch_progress("TRACE"), samples.watch_result()]
COMPILED = samples.watch_result().result
BUNDLE = samples.bundle()
ALIAS = bundle_pb2.Alias(name="tiny", alias="prod", version=2, etag="b")
NO_ALIAS = bundle_pb2.DeleteAliasResponse()
MOVED = bundle_pb2.SetAliasResponse(alias=ALIAS)
DELETED = bundle_pb2.DeleteBundleResponse(deleted_blob_count=2)
BLOBS = [bundle_pb2.ReadBlobResponse(data=b"ab"), bundle_pb2.ReadBlobResponse(data=b"c")]
DEPLOYMENT = samples.deployment()
LOADING = [
    runtime_pb2.LoadBundleResponse(progress=samples.load_progress("VERIFY", 1, 2)),
    runtime_pb2.LoadBundleResponse(deployment=DEPLOYMENT),
]
WEIGHTS = runtime_pb2.LoadWeightsResult(deployment=DEPLOYMENT, previous_weight_epoch=1, weight_epoch=2)
SWAPPING = [
    runtime_pb2.LoadWeightsResponse(progress=samples.load_progress("SWAP")),
    runtime_pb2.LoadWeightsResponse(result=WEIGHTS),
]
LISTED = ListOperationsResponse(operations=[samples.OPERATION])
TOO_LATE = generation_pb2.AbortResponse(outcome=generation_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED)
UNLOADED = runtime_pb2.UnloadBundleResponse(aborted_requests=2)
RECEIPT = runtime_pb2.ResetKVCacheResponse(zeroed_bytes=5)
SESSION = runtime_pb2.Session(id="s")
UNUSED = runtime_pb2.UnloadAdapterResponse(active_requests=1)
ADAPTERS = runtime_pb2.ListAdaptersResponse(adapters=[runtime_pb2.Adapter(name="arr")], num_slots=4)
INFO = runtime_pb2.GetServerInfoResponse(version="1")


def text_of(message: Message) -> str:
    return text_format.MessageToString(message, as_one_line=True).strip()


@dataclass(frozen=True)
class Case:
    """One call: what is called, what the server must have received, what is scripted and what the caller gets."""

    rpc: str
    call: Callable[[Any], Any]
    request: str
    answer: Any
    result: Any

    def __str__(self) -> str:
        return self.rpc


def _unary(rpc: str, call: Callable[[Any], Any], request: str, answer: Message) -> Case:
    return Case(rpc, call, request, answer, answer)


def _field(rpc: str, call: Callable[[Any], Any], request: str, **field: Any) -> Case:
    """An answer of one field, which is what the caller gets."""
    (result,) = field.values()
    (module,) = (one for one in (bundle_pb2, generation_pb2, runtime_pb2) if hasattr(one, f"{rpc}Response"))
    return Case(rpc, call, request, getattr(module, f"{rpc}Response")(**field), result)


WATCH = 'operation: "operations/7"'
DEMO, TURN = 'deployment_id: "demo"', 'chat { messages { role: "user" content: "hi" } }'
IDS, REFUSE = f"{DEMO} token_ids: 1 skip_special_tokens: false", "in_flight_policy: IN_FLIGHT_POLICY_REFUSE"
READ, RELEASED = 'digest: "sha256:ab" offset_bytes: 4 ref: "tiny:v1"', 'holder: "host-1" digest: "sha256:ab"'
SHARD = 'name: "pirate" model: "models/pirate" executables_ref: "tiny:v1" request_id: "r" skip_cache_lookup: true'
SHARD_OPTIONS: dict[str, Any] = {"request_id": "r", "skip_cache_lookup": True}
ADAPTER = ("pirate", "adapters/pirate", "tiny:v1")
ADAPTING = 'name: "pirate" adapter: "adapters/pirate" executables_ref: "tiny:v1" request_id: "r"'
QUANTIZE: dict[str, Any] = {"dtype": "int4", "layout": "nxd", "modules_to_not_convert": ["lm_head"], "request_id": "r"}
SMALL = 'model: "m" output: "m8" dtype: "int4" layout: "nxd" modules_to_not_convert: "lm_head" request_id: "r"'
QUANTIZED = samples.watch_quantized().checkpoint
QUANTIZING = [samples.watch_progress("SHARD"), samples.watch_quantized()]
COMPILER_CASES = [
    _unary("Compile", lambda c: c.start_compile(COMPILE), text_of(COMPILE), samples.OPERATION),
    _unary("PlanCompile", lambda c: c.plan_compile(PLAN), text_of(PLAN), samples.plan()),
    Case("WatchCompile", lambda c: c.watch_compile("operations/7"), WATCH, WATCHING, WATCHING),
    Case("WatchCompile", lambda c: c.compile(COMPILE), WATCH, WATCHING, COMPILED),
    Case("WatchCompile", lambda c: c.wait_compile("operations/7"), WATCH, WATCHING, COMPILED),
    _unary("ShardWeights", lambda c: c.start_shard_weights(*PIRATE, **SHARD_OPTIONS), SHARD, samples.OPERATION),
    Case("ShardWeights", lambda c: c.shard_weights(*PIRATE, **SHARD_OPTIONS), SHARD, samples.OPERATION, COMPILED),
    _unary("ShardAdapter", lambda c: c.start_shard_adapter(*ADAPTER, request_id="r"), ADAPTING, samples.OPERATION),
    Case("ShardAdapter", lambda c: c.shard_adapter(*ADAPTER, request_id="r"), ADAPTING, samples.OPERATION, COMPILED),
    _unary("QuantizeWeights", lambda c: c.start_quantize_weights("m", "m8", **QUANTIZE), SMALL, samples.OPERATION),
    Case("QuantizeWeights", lambda c: c.quantize_weights("m", "m8", **QUANTIZE), SMALL, samples.OPERATION, QUANTIZED),
    Case("WatchCompile", lambda c: c.quantize_weights("m", "m8"), WATCH, QUANTIZING, QUANTIZED),
    Case("WatchCompile", lambda c: c.wait_operation("operations/7"), WATCH, QUANTIZING, QUANTIZED),
    _unary("GetOperation", lambda c: c.get_operation("operations/7"), 'name: "operations/7"', samples.OPERATION),
    Case("ListOperations", lambda c: c.list_operations(), 'name: "operations"', LISTED, [samples.OPERATION]),
    Case("CancelOperation", lambda c: c.cancel_operation("operations/7"), 'name: "operations/7"', Empty(), None),
]
BUNDLE_CASES = [
    _field("GetBundle", lambda c: c.get_bundle("tiny@prod"), 'ref: "tiny@prod"', bundle=BUNDLE),
    _field("ListBundles", lambda c: c.list_bundles("tiny"), 'name: "tiny"', bundles=[BUNDLE]),
    _unary("DeleteBundle", lambda c: c.delete_bundle("tiny:v1"), 'ref: "tiny:v1"', DELETED),
    _field("SetBundleOwner", lambda c: c.set_owner("tiny", "bob"), 'name: "tiny" owner: "bob"', former_owner="alice"),
    Case("ReadBlob", lambda c: c.read_blob("sha256:ab", offset_bytes=4, ref="tiny:v1"), READ, BLOBS, BLOBS),
    _unary(
        "SetAlias",
        lambda c: c.set_alias("tiny:v2", "prod", etag="a", require_compatible=True),
        'ref: "tiny:v2" alias: "prod" etag: "a" require_compatible: true',
        MOVED,
    ),
    Case("DeleteAlias", lambda c: c.delete_alias("tiny", "prod"), 'name: "tiny" alias: "prod"', NO_ALIAS, None),
    _field("ListAliases", lambda c: c.list_aliases(), "", aliases=[ALIAS]),
    _field(
        "LeaseBundle",
        lambda c: c.lease_bundle("tiny@prod", "host-1", duration_s=90.5),
        'ref: "tiny@prod" holder: "host-1" duration { seconds: 90 nanos: 500000000 }',
        lease=samples.LEASE,
    ),
    _field("ReleaseLease", lambda c: c.release_lease("host-1", "sha256:ab"), RELEASED, released_count=2),
    _field("ListLeases", lambda c: c.list_leases(), "", leases=[samples.LEASE]),
    _unary(
        "CollectGarbage",
        lambda c: c.collect_garbage(dry_run=True, max_cache_age_s=60),
        "dry_run: true max_cache_age { seconds: 60 }",
        samples.COLLECTED,
    ),
    Case(
        "ImportBundle",
        lambda c: c.import_bundle("/import/store", "tiny", source_ref="stable", alias="prod", alias_etag=""),
        'layout: "/import/store" source_ref: "stable" name: "tiny" alias: "prod" alias_etag: ""',
        samples.importing(),
        samples.importing()[-1].result,
    ),
]
RUNTIME_CASES = [
    Case(
        "Generate",
        lambda c: c.generate("demo", CHAT, seed=3, request_id="r", timeout_s=9.0),
        f'{DEMO} request_id: "r" {TURN} sampling {{ seed: 3 }} stop {{ }} output {{ }}',
        samples.generation(),
        samples.generation(),
    ),
    Case("Abort", lambda c: c.abort("demo", "r"), f'{DEMO} request_id: "r"', TOO_LATE, "already_finished"),
    _field("Tokenize", lambda c: c.tokenize("demo", "hi"), f'{DEMO} text: "hi"', token_ids=[1, 2]),
    _field("Tokenize", lambda c: c.tokenize("demo", CHAT), f"{DEMO} {TURN}", token_ids=[1, 2]),
    _field(
        "Embed",
        lambda c: c.embed("demo", ["hi", [1]], pooling="mean", normalize=True, adapter="a", request_id="r"),
        f'{DEMO} request_id: "r" inputs {{ text: "hi" }} inputs {{ token_ids {{ ids: 1 }} }} pooling: POOLING_MEAN'
        ' normalize: true adapter: "a"',
        embeddings=[samples.EMBEDDING],
    ),
    _field("Detokenize", lambda c: c.detokenize("demo", [1], skip_special_tokens=False), IDS, text="hi"),
    Case(
        "LoadBundle",
        lambda c: c.load_bundle(
            "tiny@prod", "demo", cores=[1], threads_per_core=4, follow_alias=True, target_inter_token_latency_s=0.25
        ),
        'ref: "tiny@prod" deployment_id: "demo" cores: 1 threads_per_core: 4 follow_alias: true'
        " target_inter_token_latency { nanos: 250000000 }",
        LOADING,
        DEPLOYMENT,
    ),
    _unary("UnloadBundle", lambda c: c.unload_bundle("demo", in_flight="refuse"), f"{DEMO} {REFUSE}", UNLOADED),
    Case(
        "LoadWeights",
        lambda c: c.load_weights("demo", "pirate", role="draft", in_flight="continue", kv="keep", keep_old=True),
        'deployment_id: "demo" ref: "pirate" role: ROLE_DRAFT in_flight_policy: IN_FLIGHT_POLICY_CONTINUE'
        " kv_policy: KV_POLICY_KEEP keep_old_weights: true",
        SWAPPING,
        WEIGHTS,
    ),
    _field(
        "LoadAdapter",
        lambda c: c.load_adapter("demo", "pirate:v1", name="arr", replace=True),
        f'{DEMO} ref: "pirate:v1" name: "arr" replace: true',
        adapter=runtime_pb2.Adapter(name="arr"),
    ),
    _unary("UnloadAdapter", lambda c: c.unload_adapter("demo", "arr"), f'{DEMO} name: "arr"', UNUSED),
    _unary("ListAdapters", lambda c: c.list_adapters("demo"), DEMO, ADAPTERS),
    _unary("ResetKVCache", lambda c: c.reset_kv_cache("demo"), DEMO, RECEIPT),
    _field("ListSessions", lambda c: c.list_sessions("demo"), DEMO, sessions=[SESSION]),
    _field("ListDeployments", lambda c: c.list_deployments(), "", deployments=[DEPLOYMENT]),
    _field("GetDeployment", lambda c: c.get_deployment("demo"), DEMO, deployment=DEPLOYMENT),
    _unary("GetServerInfo", lambda c: c.get_server_info(), "", INFO),
]
