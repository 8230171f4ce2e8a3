"""One build in a process of its own: `python -m compiler_svc.builds.process JOB_DIRECTORY`.

Reads the job from its directory, writes progress as JSON lines on standard output, and leaves the outcome in the
directory. Leads a process group, so that whatever it starts can be ended with it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog

from bundle.errors import KilnError
from compiler_svc.builds.job import BuildOutcome, JobDirectory
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import BuildFailed
from compiler_svc.records import Progress
from edge.logs import configure_logging
from execution.failure import Failure
from execution.parent_death import die_with_parent


def main(path: Path) -> None:
    """Runs the job of a directory."""
    signal.signal(signal.SIGTERM, _end_process_group)
    die_with_parent(signal.SIGTERM)
    configure_logging("compiler-build")
    directory = JobDirectory(path)
    with directory.working():
        directory.write_outcome(_build(directory, ProgressReport(_claim_stdout())))


def _build(directory: JobDirectory, report: ProgressReport) -> BuildOutcome:
    # Takes seconds, with torch and transformers, and by now the process dies with its parent.
    from compiler_svc.pipeline import run_build  # noqa: PLC0415

    try:
        return BuildOutcome(result=run_build(directory.read_job(), directory, report))
    except KilnError as error:
        return BuildOutcome(error=Failure.of(error))
    except Exception as error:  # noqa: BLE001 - the last line before the service
        structlog.get_logger("build").exception("build failed")
        return BuildOutcome(
            error=Failure.of(BuildFailed(f"{type(error).__name__}, which the compiler's log describes"))
        )


def _claim_stdout() -> Callable[[Progress], None]:
    """Takes standard output for progress alone: what libraries and compilers print goes to standard error."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def write(progress: Progress) -> None:
        stream.write(progress.to_json() + b"\n")

    return write


def _end_process_group(_signal: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
