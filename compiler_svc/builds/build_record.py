"""The build record, which is published beside a bundle: facts that differ from one build to the next."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bundle.digest import canonical_json
from bundle.manifest import Manifest
from bundle.store.layout import Layout
from bundle.store.referrers import add_referrer
from compiler_svc.builds.build import Build
from compiler_svc.builds.executable_stage import BuiltExecutable
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.database.actuals import BuildActual, BuildFacts, LoweringActual
from compiler_svc.golden.check import GoldenResult
from compiler_svc.planning.digest import digest_plan
from compiler_svc.records import GOLDEN_TYPE, ExecutableResult, Stage

BUILD_TYPE: Final = "application/vnd.kiln.build.v1+json"


class BuildRecorder:
    """Collects the facts of a build and attaches them to its bundle."""

    def __init__(self, report: ProgressReport) -> None:
        self.golden: GoldenResult | None = None
        self._report = report

    def attach(
        self,
        layout: Layout,
        digest: str,
        manifest: Manifest,
        executables: Sequence[ExecutableResult],
        warnings: Sequence[str],
    ) -> None:
        """Publishes the records as referrers of a bundle that is in the index."""
        if self.golden is not None:
            _attach(layout, digest, GOLDEN_TYPE, msgspec.to_builtins(self.golden), "golden.json")
        record = {
            "toolchain": manifest.toolchain,
            "stages_s": {stage: round(seconds, 3) for stage, seconds in self._report.measure_stages().items()},
            "executables": msgspec.to_builtins(executables),
            "warnings": list(warnings),
            "host": {"cpu": _read_cpu_name(), "cpu_count": os.cpu_count(), "system": platform.platform()},
            # Each of a single process: the build's own, and the largest that it started.
            "peak_memory_bytes": {
                "build": _peak_memory_bytes(resource.RUSAGE_SELF),
                "lowering": _peak_memory_bytes(resource.RUSAGE_CHILDREN),
            },
        }
        _attach(layout, digest, BUILD_TYPE, record, "build.json")


def _attach(layout: Layout, digest: str, kind: str, record: dict[str, Any], title: str) -> None:
    add_referrer(layout, digest, kind, kind, canonical_json(record), title=title)


def _peak_memory_bytes(who: int) -> int:
    return resource.getrusage(who).ru_maxrss * 1024


def _read_cpu_name() -> str:
    """The processor's name, or its architecture if the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def describe_facts(build: Build, executables: Sequence[BuiltExecutable]) -> BuildFacts:
    """Describes a build that is about to end."""
    spec, plan = build.spec, build.plan
    digests = digest_plan(plan, target=spec.target, optimization_level=spec.optimization_level, salt=spec.salt)
    stages_s = build.report.measure_stages()
    num_layers = len(plan.model.description.layers)
    who = resource.RUSAGE_SELF if spec.lowering.in_process else resource.RUSAGE_CHILDREN
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
            num_executables=sum(one.traced.shares_with is None for one in executables),
            weights_bytes=plan.weights.shard_size_bytes * plan.model.tp_degree,
            trace_s=trace_s,
            rest_s=sum(stages_s.values()) - trace_s - stages_s.get(Stage.LOWER, 0.0),
        ),
    )
