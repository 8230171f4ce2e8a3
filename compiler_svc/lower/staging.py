"""Putting a program where a lowering process can take it up."""

from __future__ import annotations

from pathlib import Path

from torch.export import ExportedProgram

from compiler_svc.lower.job import LoweringJob, LoweringOptions, write_job
from compiler_svc.lower.program import constant_names, placeholders, save_program


def stage_job(
    program: ExportedProgram,
    *,
    tag: str,
    num_state: int,
    options: LoweringOptions,
    directory: Path,
    cache_dir: Path,
) -> LoweringJob:
    """Writes a program, without its weights, and a job for it.

    Args:
        program: Functional: its last `num_state` inputs are the state, its last `num_state` outputs the new state.
            Of its weights only names, shapes and dtypes count; they may be fake or uninitialized.
        directory: Of this job alone; made here.
        cache_dir: Shared by all jobs; made here.

    Raises:
        ProgramUnsupported: The program is not functional, or holds tensors of its own.
    """
    job = LoweringJob(
        tag=tag,
        directory=directory.resolve(),
        cache_dir=cache_dir.resolve(),
        num_state=num_state,
        constants=constant_names(program),
        reserved_bytes=sum(tensor.nbytes for tensor in placeholders(program).values()),
        options=options,
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    job.cache_dir.mkdir(parents=True, exist_ok=True)
    save_program(program, job.program_path)
    write_job(job)
    return job
