"""The stage that compares a bundle with the reference: by its executables, or by what stands for them on this host.

Executables for a device run on the host's cores, if it has free ones and they may be taken. Otherwise XLA computes on
the CPU what they were made of, in the interpreter that made them, if that has torch-xla. If it has not, nothing is
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from bundle.manifest import Manifest
from compiler_svc.builds.build import Forkservers
from compiler_svc.builds.job import BuildJob, JobDirectory
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.config import NeuronConfig
from compiler_svc.golden.check import GoldenResult, check_golden, compare_steps
from compiler_svc.golden.steps import RankSteps
from compiler_svc.lower.neuron.xla_runner import XlaRunner, xla_runner
from compiler_svc.planning.build_plan import BuildPlan, describe_executables
from compiler_svc.records import Stage
from compiler_svc.trace.submodel_document import MAKE_MODULE
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tensors import check_finite
from execution.device_errors import DeviceBusy, DeviceUnsuitable, NeuronLibraryMissing
from targets.registry import TARGETS

#: Why a host cannot run executables of a device, none of which says anything of the executables.
_NO_CORES: Final = (NeuronLibraryMissing, DeviceUnsuitable, DeviceBusy)
#: What callers hear of a check that ran no executable, and of none.
_BY_XLA: Final = (
    "target.kind: no executable ran, because the compiler's host has no core of {kind} that is free and may be taken: "
    "XLA on the CPU computed what they were made of, and that was compared with the reference"
)
_NONE: Final = (
    "target.kind: the executables are not compared with the reference, which takes a free core of {kind} on the "
    "compiler's host, or torch-xla in the interpreter for Neuron"
)

_log = structlog.get_logger("build")


@dataclass(frozen=True)
class GoldenStage:
    """The golden check of one build."""

    job: BuildJob
    directory: JobDirectory
    report: ProgressReport
    forkservers: Forkservers
    plan: BuildPlan
    checkpoint: Checkpoint
    config: NeuronConfig
    blob_path: Callable[[str], Path]

    def check(self, manifest: Manifest) -> tuple[GoldenResult | None, tuple[str, ...]]:
        """Compares a bundle that has weights with the reference; returns the result, None if nothing on this host
        stands for the executables, and warnings.
        """
        self.report.enter(Stage.VERIFY, "comparing logits with the reference")
        try:
            result, warnings = self._compare(manifest)
        except Exception:
            # Whatever it is: steps fail in many ways on NaN, compiled ones with messages of C++.
            check_finite(self.checkpoint)
            raise
        self.report.update(message=warnings[0] if result is None else result.summary)
        return result, warnings

    def _compare(self, manifest: Manifest) -> tuple[GoldenResult | None, tuple[str, ...]]:
        is_for_host = TARGETS[manifest.target.kind].is_checked_on_host
        changes = self.plan.changes
        if is_for_host or self.job.environment.checks_on_cores:
            try:
                return check_golden(manifest, self.blob_path, self.checkpoint, self.forkservers.ranks, changes), ()
            except _NO_CORES as error:
                if is_for_host:
                    raise
                _log.info("no cores for the golden check", reason=str(error))
        with xla_runner(self.directory.work, timeout_s=self.job.environment.lowering_timeout_s) as runner:
            if runner is None:
                return None, (_NONE.format(kind=manifest.target.kind),)
            steps = self._open(manifest, runner)
            result = compare_steps(manifest, steps, self.checkpoint, method="xla_cpu", changes=changes)
        return result, (_BY_XLA.format(kind=manifest.target.kind),)

    def _open(self, manifest: Manifest, runner: XlaRunner) -> RankSteps:
        # Logits are compared, too, if clients get none.
        plan = replace(self.plan, model=replace(self.plan.model, returns_internal=True))
        documents = {
            submodel.tag: plan.write_submodel(self.checkpoint.config, submodel)
            for submodel in describe_executables(plan.model, self.config)
        }
        shards = sorted(manifest.shards(), key=lambda shard: shard.rank)
        runner.open(MAKE_MODULE, documents, [self.blob_path(shard.blob) for shard in shards if shard.blob is not None])
        return RankSteps(runner.run, runner.write_adapter, manifest.tokens.vocab_size)
