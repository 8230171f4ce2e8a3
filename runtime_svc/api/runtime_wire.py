"""Converts messages of RuntimeService."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.unknown_fields import UnknownFieldSet
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.errors import FieldViolation
from bundle.manifest import Manifest
from edge.request_id import REQUEST_ID, make_id_violation
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.api.generation_wire import duration_to_pb, sampling_to_pb
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.deployment_spec import DeploymentSpec
from runtime_svc.deployments.memory import measure_kept_state, measure_kept_weights
from runtime_svc.deployments.progress import LoadProgress, LoadStage
from runtime_svc.deployments.records import AdapterRecord
from runtime_svc.engine.adapters import LoadedAdapter
from runtime_svc.engine.engine import Engine
from runtime_svc.engine.operations import InFlightPolicy, ResetReceipt, WeightsReceipt
from runtime_svc.engine.request import Session
from runtime_svc.errors import FeatureNotServed, RequestInvalid

#: What a reset forgets.
ResetScope = Literal["deployment", "prefix_cache", "session"]

#: Ours have the names that the API has for them.
_STATES = {state: pb.Deployment.State.Value(f"STATE_{state.name}") for state in DeploymentState}
_STAGES = {stage: pb.LoadProgress.Stage.Value(f"STAGE_{stage.name}") for stage in LoadStage}
_POLICIES = {pb.InFlightPolicy.Value(f"IN_FLIGHT_POLICY_{policy.name}"): policy for policy in InFlightPolicy}
#: Fields of capabilities that the API has under their own names, and as they are.
_SAME_CAPABILITIES = set(pb.Capabilities.DESCRIPTOR.fields_by_name) - {
    "default_sampling",
    "default_parameters",
    "max_new_tokens",
    "submodels",
}


def spec_from_pb(request: pb.LoadBundleRequest) -> DeploymentSpec:
    """Converts a LoadBundle request to a specification."""
    return DeploymentSpec(
        deployment_id=request.deployment_id,
        ref=request.ref,
        cores=tuple(request.cores),
        threads_per_core=request.threads_per_core if request.HasField("threads_per_core") else None,
        follow_alias=request.follow_alias,
        target_inter_token_latency_s=(
            request.target_inter_token_latency.ToNanoseconds() / 1e9
            if request.HasField("target_inter_token_latency")
            else None
        ),
    )


def policy_from_pb(value: pb.InFlightPolicy.ValueType, *, default: InFlightPolicy) -> InFlightPolicy:
    """Converts the policy of UnloadBundle and ResetKVCache for running requests."""
    policy = _find_policy(value, default)
    if policy is None or policy in {InFlightPolicy.CONTINUE, InFlightPolicy.FINISH_ON_OLD}:
        raise RequestInvalid([_policy_violation(value, "WAIT, ABORT or REFUSE")])
    return policy


def reset_scope_from_pb(request: pb.ResetKVCacheRequest, capabilities: Capabilities) -> ResetScope:
    """Returns what a reset forgets."""
    scope = request.WhichOneof("scope")
    if scope is None and len(UnknownFieldSet(request)) > 0:
        accepted = "deployment, prefix_cache, session"
        raise FeatureNotServed([FieldViolation("scope", "a field that this server does not know", accepted)])
    if scope is None or scope == "deployment":
        return "deployment"
    if scope == "session" and not REQUEST_ID.fullmatch(request.session.session_id):
        raise RequestInvalid([make_id_violation("session.session_id", request.session.session_id)])
    if scope == "prefix_cache" and not capabilities.prefix_caching:
        accepted = "deployment: the bundle is compiled without neuron_config.is_prefix_caching"
        raise FeatureNotServed([FieldViolation("scope", scope, accepted)])
    if scope == "session" and not capabilities.sessions:
        raise FeatureNotServed([FieldViolation("scope", scope, "deployment: it serves no sessions")])
    if request.in_flight_policy != pb.IN_FLIGHT_POLICY_UNSPECIFIED:
        accepted = f"unset with scope {scope}: running requests go on"
        raise RequestInvalid([_policy_violation(request.in_flight_policy, accepted)])
    return scope


def weight_policies_from_pb(request: pb.LoadWeightsRequest) -> tuple[InFlightPolicy, bool]:
    """Returns the policy of LoadWeights for running requests, and whether it keeps the KV cache."""
    violations = []
    if request.role not in pb.Role.values():
        violations.append(FieldViolation("role", str(request.role), "ROLE_TARGET"))
    if request.kv_policy not in pb.KvPolicy.values():
        violations.append(FieldViolation("kv_policy", str(request.kv_policy), "INVALIDATE or KEEP"))
    keep_kv = request.kv_policy == pb.KV_POLICY_KEEP
    policy = _find_policy(request.in_flight_policy, InFlightPolicy.WAIT)
    # Keys and values are of the weights that compute their sequence: with one of the two they must be, or must not.
    needs_kv = {InFlightPolicy.CONTINUE: True, InFlightPolicy.FINISH_ON_OLD: False}
    if policy is None or needs_kv.get(policy, keep_kv) is not keep_kv:
        accepted = "WAIT, ABORT, REFUSE, with KV_POLICY_KEEP CONTINUE, without it FINISH_ON_OLD"
        violations.append(_policy_violation(request.in_flight_policy, accepted))
    if violations or policy is None:
        raise RequestInvalid(violations)
    if request.role == pb.ROLE_DRAFT:
        raise FeatureNotServed([FieldViolation("role", "ROLE_DRAFT", "ROLE_TARGET")])
    return policy, keep_kv


def progress_to_pb(progress: LoadProgress) -> pb.LoadProgress:
    """Converts the progress of a load."""
    return pb.LoadProgress(
        stage=_STAGES[progress.stage], done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
    )


def deployment_to_pb(deployment: Deployment) -> pb.Deployment:
    """Converts a deployment as it is now."""
    engine, target_s = deployment.engine, deployment.target_inter_token_latency_s
    return pb.Deployment(
        id=deployment.deployment_id,
        state=_STATES[deployment.state],
        roles=[_target_role_to_pb(deployment)],
        cores=deployment.cores,
        capabilities=_capabilities_to_pb(deployment.capabilities),
        load=None if engine is None else _load_to_pb(engine, len(deployment.adapters)),
        message=deployment.trouble,
        create_time=timestamp_to_pb(deployment.created_at_s),
        weights_bytes=0 if engine is None else engine.ranks.weights_bytes,
        kv_bytes=0 if engine is None else engine.ranks.state_bytes,
        threads_per_core=deployment.threads_per_core,
        followed_alias=deployment.followed_alias,
        follow_message=deployment.followed.message,
        followed_version=deployment.followed.version,
        followed_digest=deployment.followed.digest,
        degraded=deployment.followed.error is not None,
        target_inter_token_latency=None if target_s is None else duration_to_pb(target_s),
        kept_weights=_kept_to_pb(deployment, measure_kept_weights),
        kept_kv=_kept_to_pb(deployment, measure_kept_state),
        old_weights=_old_weights_to_pb(deployment),
    )


def deployment_info_to_pb(deployment: Deployment) -> pb.DeploymentInfo:
    """Converts the facts that a client needs before it generates."""
    return pb.DeploymentInfo(
        id=deployment.deployment_id,
        state=_STATES[deployment.state],
        capabilities=_capabilities_to_pb(deployment.capabilities),
        chunk_tokens=0 if deployment.engine is None else deployment.engine.scheduler.policy.chunk_size.tokens,
        weights_version="" if deployment.weights is None else deployment.weights.version,
        weights_digest="" if deployment.weights is None else deployment.weights.digest,
        degraded=deployment.followed.error is not None,
    )


def reset_receipt_to_pb(receipt: ResetReceipt) -> pb.ResetKVCacheResponse:
    """Converts the receipt of a reset."""
    return pb.ResetKVCacheResponse(
        affected_sequences=receipt.affected_sequences,
        freed_slots=receipt.affected_sequences,
        freed_blocks=receipt.freed_blocks,
        zeroed_bytes=receipt.zeroed_bytes,
        weight_epoch=receipt.weight_epoch,
        duration=duration_to_pb(receipt.duration_s),
    )


def session_to_pb(session: Session, loop_started_at_s: float) -> pb.Session:
    """Converts a session as it is now; the event loop's clock was 0 at `loop_started_at_s`, in seconds since 1970."""
    expires_s = session.expires_s
    return pb.Session(
        id=session.session_id,
        held_tokens=session.num_held_tokens,
        running=session.user is not None,
        last_use_time=timestamp_to_pb(loop_started_at_s + session.last_used_s),
        expire_time=None if expires_s is None else timestamp_to_pb(loop_started_at_s + expires_s),
    )


def adapter_to_pb(record: AdapterRecord, loaded: LoadedAdapter | None) -> pb.Adapter:
    """Converts what a name of an adapter means; None if that is another one by now."""
    return pb.Adapter(
        name=record.name,
        digest=record.digest,
        bundle_ref=record.ref,
        bundle_digest=record.bundle_digest,
        owner=record.owner or "",
        slot=None if loaded is None else loaded.slot,
        active_requests=0 if loaded is None else loaded.num_users,
    )


def weights_receipt_to_pb(receipt: WeightsReceipt, deployment: Deployment) -> pb.LoadWeightsResult:
    """Converts the receipt of a weight load."""
    return pb.LoadWeightsResult(
        deployment=deployment_to_pb(deployment),
        previous_weight_epoch=receipt.previous_weight_epoch,
        weight_epoch=receipt.weight_epoch,
        aborted_requests=receipt.aborted_requests,
        pause_duration=duration_to_pb(receipt.pause_s),
    )


def timestamp_to_pb(seconds: float) -> Timestamp:
    """Converts a point in time from seconds since 1970."""
    timestamp = Timestamp()
    timestamp.FromNanoseconds(round(seconds * 1e9))
    return timestamp


def _find_policy(value: pb.InFlightPolicy.ValueType, default: InFlightPolicy) -> InFlightPolicy | None:
    return default if value == pb.IN_FLIGHT_POLICY_UNSPECIFIED else _POLICIES.get(value)


def _policy_violation(value: pb.InFlightPolicy.ValueType, accepted: str) -> FieldViolation:
    is_known = value in pb.InFlightPolicy.values()
    return FieldViolation("in_flight_policy", pb.InFlightPolicy.Name(value) if is_known else str(value), accepted)


def _kept_to_pb(deployment: Deployment, measure: Callable[[Manifest], Counter[str]]) -> list[pb.KeptMemory]:
    kept = Counter[str]() if deployment.bundle is None else measure(deployment.bundle.manifest)
    return [pb.KeptMemory(format=name, size_bytes=size_bytes) for name, size_bytes in kept.items()]


def _old_weights_to_pb(deployment: Deployment) -> pb.OldWeights | None:
    engine, record = deployment.engine, deployment.old_weights
    if engine is None or engine.weights.old is None or record is None or deployment.bundle is None:
        return None
    return pb.OldWeights(
        ref=record.ref,
        digest=record.digest,
        version=record.version,
        weight_epoch=engine.weights.old.weight_epoch,
        active_requests=engine.scheduler.num_old,
        kept=engine.weights.old.is_kept,
        # They fit the same executables, so they are as large as the bundle's own.
        size_bytes=measure_kept_weights(deployment.bundle.manifest).total(),
    )


def _target_role_to_pb(deployment: Deployment) -> pb.RoleStatus:
    bundle, weights = deployment.bundle, deployment.weights
    return pb.RoleStatus(
        role=pb.ROLE_TARGET,
        bundle_ref=deployment.spec.ref,
        bundle_digest=deployment.digest or "",
        bundle_version=deployment.version,
        weights_ref="" if weights is None else weights.ref,
        weights_digest="" if weights is None else weights.digest,
        weights_version="" if weights is None else weights.version,
        weight_epoch=deployment.weight_epoch,
        graph_abi_digest="" if bundle is None else bundle.manifest.graph_abi_digest,
    )


def _capabilities_to_pb(capabilities: Capabilities | None) -> pb.Capabilities | None:
    if capabilities is None:
        return None
    default = capabilities.default_sampling
    parameters = sampling_to_pb(default)
    parameters.ClearField("seed")
    return pb.Capabilities(
        default_parameters=parameters,
        default_sampling=pb.DefaultSampling(
            **{name: getattr(default, name) for name in pb.DefaultSampling.DESCRIPTOR.fields_by_name}
        ),
        max_new_tokens=capabilities.max_new_tokens or 0,
        submodels=[
            pb.SubmodelBuckets(submodel=one.submodel, batch_size=one.batch_size, tokens=one.tokens)
            for one in capabilities.submodels
        ],
        **{name: getattr(capabilities, name) for name in _SAME_CAPABILITIES},
    )


def _load_to_pb(engine: Engine, num_adapters: int) -> pb.Load:
    kv = engine.scheduler.kv
    return pb.Load(
        used_slots=engine.scheduler.num_running,
        total_slots=engine.scheduler.max_running,
        queued_requests=len(engine.scheduler.waiting),
        queue_capacity=engine.requests.queue_capacity,
        steps=engine.num_steps,
        used_blocks=kv.num_used_blocks,
        total_blocks=kv.num_blocks,
        block_tokens=kv.block_tokens,
        used_tokens=engine.scheduler.num_kv_tokens,
        queued_tokens=engine.scheduler.num_waiting_tokens,
        adapters=num_adapters,
    )
