"""One build in progress: what its stages share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bundle.layout import Layout
from compiler_svc.builds.finished_lowerings import FinishedLowerings
from compiler_svc.builds.job import BuildJob
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.database.engine import Database
from compiler_svc.nurseries.nursery import Nursery
from compiler_svc.planning.build_plan import BuildPlan
from compiler_svc.planning.job_spec import CompileSpec
from compiler_svc.weights.checkpoint import Checkpoint
from execution.ranks.nursery import RankNursery


@dataclass(frozen=True, slots=True)
class Nurseries:
    """Where a build's processes come from.

    Attributes:
        ranks: Of the golden check; None for one of the check's own.
        lowerings: Of all builds.
    """

    ranks: RankNursery | None
    lowerings: Nursery


@dataclass(frozen=True)
class Build:
    """One build in progress.

    Attributes:
        layout: Store that the bundle is published in; pins what is written.
        database: Holds the action cache.
        finished: What is lowered already, by this attempt or an earlier one.
        work: Scratch directory of this attempt alone.
        report: Where progress goes.
        nurseries: Where processes come from.
    """

    job: BuildJob
    spec: CompileSpec
    checkpoint: Checkpoint
    plan: BuildPlan
    layout: Layout
    database: Database
    finished: FinishedLowerings
    work: Path
    report: ProgressReport
    nurseries: Nurseries
