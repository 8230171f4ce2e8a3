"""protobuf ↔ records, for plan reports."""

from __future__ import annotations

import json
from typing import Final

from google.protobuf.duration_pb2 import Duration
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.errors import FieldViolation
from compiler_svc.api.compiler_wire import build_fields_from_pb
from compiler_svc.config.domains import show
from compiler_svc.errors import ConfigInvalid
from compiler_svc.planning.cost import CostEstimate
from compiler_svc.planning.graph_check import GraphCheck
from compiler_svc.planning.memory import RankMemory
from compiler_svc.planning.planner import PlanRequest
from compiler_svc.planning.report import LargestSizes, PlanReport

_LEAST_CORE_BYTES: Final = 1 << 20


def plan_request_from_pb(request: pb.PlanCompileRequest) -> PlanRequest:
    """Reads a request.

    Raises:
        ConfigInvalid: The configuration text is not a JSON object, an enum value is unknown, or a core has no memory.
    """
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
        largest=None if plan.largest.is_none else _largest_to_pb(plan.largest),
        executables=[
            pb.ExecutablePlan(
                tag=executable.tag,
                submodel=executable.submodel,
                bucket=pb.Bucket(tokens=executable.bucket),
                cache=pb.CACHE_RESULT_HIT if executable.is_cached else pb.CACHE_RESULT_MISS,
            )
            for executable in plan.executables
        ],
        hints=[pb.Hint(field=hint.field, value=show(hint.value), reason=hint.reason) for hint in plan.hints],
        warnings=plan.warnings,
        cores_needed=plan.cores_needed,
        cost=None if plan.cost is None else _cost_to_pb(plan.cost),
        resolved_config_json=json.dumps(plan.config.to_json()),
        graph_check=None if plan.graph_check is None else _check_to_pb(plan.graph_check),
    )


def _check_to_pb(check: GraphCheck) -> pb.GraphCheck:
    return pb.GraphCheck(
        num_graphs=check.num_graphs,
        num_findings=check.num_findings,
        findings=[
            pb.GraphFinding(
                tag=one.tag,
                submodel=one.submodel,
                bucket=pb.Bucket(tokens=one.bucket),
                code=one.finding.code,
                operation=one.finding.operation,
                accepted=one.finding.wanted,
                source=one.finding.source,
            )
            for one in check.findings
        ],
    )


def _rank_to_pb(rank: int, memory: RankMemory, limit_bytes: int) -> pb.RankPlan:
    return pb.RankPlan(
        rank=rank,
        weights_bytes=_int64(memory.weights_bytes),
        kv_bytes=_int64(memory.kv_bytes),
        activation_bytes=_int64(memory.activation_bytes),
        code_bytes=_int64(memory.code_bytes),
        limit_bytes=limit_bytes,
        lora_bytes=_int64(memory.lora_bytes),
        weight_groups=[
            pb.WeightGroup(name=name, size_bytes=_int64(size_bytes))
            for name, size_bytes in memory.weight_groups.items()
        ],
    )


def _int64(size_bytes: int) -> int:
    """Limits a size to what the wire can carry: a configuration can ask for more memory than exists anywhere."""
    return min(size_bytes, 2**63 - 1)


def _largest_to_pb(largest: LargestSizes) -> pb.LargestSizes:
    return pb.LargestSizes(batch_size=largest.batch_size, seq_len=largest.seq_len, pa_num_blocks=largest.pa_num_blocks)


def _cost_to_pb(cost: CostEstimate) -> pb.CostEstimate:
    duration = Duration()
    duration.FromNanoseconds(round(cost.duration_s * 1e9))
    return pb.CostEstimate(duration=duration, peak_memory_bytes=cost.peak_memory_bytes, num_records=cost.num_records)
