"""protobuf ↔ records, for plan reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.errors import FieldViolation
from compiler_svc.api.compiler_wire import build_fields_from_pb, cache_result_to_pb, copy_fields, duration_to_pb
from compiler_svc.config.domains import show
from compiler_svc.errors import ConfigInvalid
from compiler_svc.planning.cost import CostEstimate
from compiler_svc.planning.graph_check import GraphCheck
from compiler_svc.planning.memory import RankMemory
from compiler_svc.planning.planner import PlanRequest
from compiler_svc.planning.report import PlanReport

_LEAST_CORE_BYTES: Final = 1 << 20


def plan_request_from_pb(request: pb.PlanCompileRequest) -> PlanRequest:
    """Reads a request."""
    fields = build_fields_from_pb(request)
    core_bytes = request.core_memory_bytes
    if core_bytes != 0 and core_bytes < _LEAST_CORE_BYTES:
        accepted = f"0, which takes the target's, or at least {_LEAST_CORE_BYTES} bytes"
        raise ConfigInvalid([FieldViolation("core_memory_bytes", str(core_bytes), accepted)])
    return PlanRequest(core_memory_bytes=core_bytes or None, check_graphs=request.check_graphs, **fields)


def plan_to_pb(plan: PlanReport) -> pb.PlanCompileResponse:
    """Writes a plan report."""
    return pb.PlanCompileResponse(
        submodels=[
            pb.SubmodelPlan(
                name=submodel.name,
                batch=submodel.batch_size,
                buckets=[pb.Bucket(tokens=bucket) for bucket in submodel.buckets],
            )
            for submodel in plan.submodels
        ],
        ranks=[_rank_to_pb(rank, plan.memory, plan.limit_bytes) for rank in range(plan.num_ranks)],
        fits=plan.fits,
        largest=None if plan.largest.is_none else copy_fields(pb.LargestSizes, plan.largest),
        executables=[
            copy_fields(
                pb.ExecutablePlan,
                executable,
                bucket=pb.Bucket(tokens=executable.bucket),
                cache=cache_result_to_pb(executable.is_cached),
            )
            for executable in plan.executables
        ],
        hints=[copy_fields(pb.Hint, hint, value=show(hint.value)) for hint in plan.hints],
        warnings=plan.warnings,
        cores_needed=plan.cores_needed,
        cost=None if plan.cost is None else _cost_to_pb(plan.cost),
        resolved_config_json=json.dumps(plan.config.to_json()),
        graph_check=None if plan.graph_check is None else _check_to_pb(plan.graph_check),
    )


def _check_to_pb(check: GraphCheck) -> pb.GraphCheck:
    findings = [
        copy_fields(
            pb.GraphFinding,
            one.finding,
            tag=one.tag,
            submodel=one.submodel,
            bucket=pb.Bucket(tokens=one.bucket),
            accepted=one.finding.wanted,
        )
        for one in check.findings
    ]
    return copy_fields(pb.GraphCheck, check, findings=findings)


def _rank_to_pb(rank: int, memory: RankMemory, limit_bytes: int) -> pb.RankPlan:
    parts = ("weights_bytes", "kv_bytes", "activation_bytes", "code_bytes", "lora_bytes")
    return pb.RankPlan(
        rank=rank,
        limit_bytes=limit_bytes,
        weight_groups=[
            pb.WeightGroup(name=name, size_bytes=_int64(size)) for name, size in memory.weight_groups.items()
        ],
        kept_weights=_kept_to_pb(memory.kept_weights),
        kept_kv=_kept_to_pb(memory.kept_kv),
        **{name: _int64(getattr(memory, name)) for name in parts},
    )


def _kept_to_pb(kept: Mapping[str, int]) -> list[pb.KeptBytes]:
    return [pb.KeptBytes(format=name, size_bytes=_int64(size)) for name, size in kept.items()]


def _int64(size_bytes: int) -> int:
    """Limits a size to what the wire can carry: a configuration can ask for more memory than exists anywhere."""
    return min(size_bytes, 2**63 - 1)


def _cost_to_pb(cost: CostEstimate) -> pb.CostEstimate:
    return copy_fields(pb.CostEstimate, cost, duration=duration_to_pb(cost.duration_s))
