"""Optimization level 0: the graph itself, for quick tests and hosts without a C++ compiler."""

from __future__ import annotations

from compiler_svc.lower.job import LoweredExecutable, LoweringJob


class ExportedProgramBackend:
    """Keeps the staged program as the executable; the executor runs it operator by operator."""

    def lower(self, job: LoweringJob) -> LoweredExecutable:
        """Names the staged program."""
        return LoweredExecutable(
            tag=job.tag,
            path=job.program_path,
            format="exported_program",
            state_convention="functional",
            constants=job.constants,
        )
