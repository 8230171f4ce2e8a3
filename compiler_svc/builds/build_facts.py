"""What a build tells for later plans: which plans its executables were of, and what they cost."""

from __future__ import annotations

import resource
from collections.abc import Sequence

from compiler_svc.builds.build import Build
from compiler_svc.builds.executable_stage import BuiltExecutable
from compiler_svc.database.actuals import BuildActual, BuildFacts, LoweringActual
from compiler_svc.planning.digest import digest_plan
from compiler_svc.records import Stage


def describe_facts(build: Build, executables: Sequence[BuiltExecutable]) -> BuildFacts:
    """The facts of a build that is about to end."""
    spec, plan = build.spec, build.plan
    digests = digest_plan(plan, target=spec.target, optimization_level=spec.optimization_level, salt=spec.salt)
    stages_s = build.report.measure_stages()
    num_layers = plan.model.config.num_hidden_layers
    # At level 0 lowering happens in this process.
    who = resource.RUSAGE_CHILDREN if spec.optimization_level else resource.RUSAGE_SELF
    peak_memory_bytes = resource.getrusage(who).ru_maxrss * 1024
    trace_s = stages_s.get(Stage.TRACE, 0.0)
    return BuildFacts(
        target_kind=spec.target.kind,
        optimization_level=spec.optimization_level,
        action_digests={digests[one.traced.spec.tag]: one.traced.action_digest for one in executables},
        lowerings={
            one.traced.action_digest: LoweringActual(
                submodel=one.traced.spec.submodel,
                num_layers=num_layers,
                duration_s=one.duration_s,
                peak_memory_bytes=peak_memory_bytes,
            )
            for one in executables
            if one.duration_s is not None
        },
        build=BuildActual(
            num_layers=num_layers,
            num_executables=len(executables),
            weights_bytes=plan.weights.shard_size_bytes * plan.model.tp_degree,
            trace_s=trace_s,
            rest_s=sum(stages_s.values()) - trace_s - stages_s.get(Stage.LOWER, 0.0),
        ),
    )
