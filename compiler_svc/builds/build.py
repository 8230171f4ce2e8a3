"""The state that the stages of one build share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bundle.store.layout import Layout
from compiler_svc.builds.finished_lowerings import FinishedLowerings
from compiler_svc.builds.job import BuildJob
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.database.engine import Database
from compiler_svc.planning.build_plan import BuildPlan
from compiler_svc.planning.job_spec import CompileJobSpec
from compiler_svc.weights.checkpoint import Checkpoint
from execution.forkserver.client import ForkserverClient
from execution.ranks.forkservers import OpenForkserver


@dataclass(frozen=True, slots=True)
class Forkservers:
    """The forkservers that a build takes processes from."""

    ranks: OpenForkserver
    lowerings: ForkserverClient
    texts: ForkserverClient


@dataclass(frozen=True)
class Build:
    """One build in progress. `layout`, in which the bundle is published, pins every blob that the build writes;
    `finished` has what this attempt or an earlier one has lowered; `work` is scratch space of this attempt alone.
    """

    job: BuildJob
    spec: CompileJobSpec
    checkpoint: Checkpoint
    plan: BuildPlan
    layout: Layout
    database: Database
    finished: FinishedLowerings
    work: Path
    report: ProgressReport
    forkservers: Forkservers
