"""Optimization level 0: the staged program is the executable; an executor runs it operator by operator."""

from __future__ import annotations

from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from targets.cpu import EXPORTED_PROGRAM


def keep_program(job: LoweringJob) -> LoweredExecutable:
    """Returns the staged program as the executable."""
    return LoweredExecutable(
        tag=job.tag,
        path=job.program_path,
        format=EXPORTED_PROGRAM.name,
        state_convention=EXPORTED_PROGRAM.state_convention,
        constants=job.constants,
    )
