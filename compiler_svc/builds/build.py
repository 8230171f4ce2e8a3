"""One build in progress: what its stages share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bundle.layout import Layout
from compiler_svc.builds.job import BuildJob
from compiler_svc.builds.plan import BuildPlan
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.database.engine import Database
from compiler_svc.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Build:
    """One build in progress.

    Attributes:
        layout: Store that the bundle is published in.
        database: Holds the action cache.
        work: Scratch directory of this build alone.
        report: Where progress goes.
    """

    job: BuildJob
    checkpoint: Checkpoint
    plan: BuildPlan
    layout: Layout
    database: Database
    work: Path
    report: ProgressReport
