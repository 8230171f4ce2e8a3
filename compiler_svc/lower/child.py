"""One lowering in a process of its own: `python -m compiler_svc.lower.child DIRECTORY [MEMORY_LIMIT_BYTES]`.

Runs the job of the directory and writes its outcome there. A named error is an outcome; anything else ends the process
with a traceback on standard error.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType

from bundle.errors import KilnError
from compiler_svc.lower.job import read_job, write_outcome
from execution.failure import Failure
from execution.parent_death import die_with_parent


def main(directory: Path, memory_limit_bytes: int | None = None) -> None:
    """Runs one job."""
    signal.signal(signal.SIGTERM, _end_process_group)
    die_with_parent(signal.SIGTERM)
    # Takes seconds, with torch, and by now the process dies with its parent.
    from compiler_svc.lower.aoti import AotiBackend  # noqa: PLC0415

    job = read_job(directory)
    if memory_limit_bytes is not None:
        limit_bytes = memory_limit_bytes + job.reserved_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    try:
        write_outcome(job, AotiBackend().lower(job))
    except KilnError as error:
        write_outcome(job, Failure.of(error))


def _end_process_group(_signal: int, _frame: FrameType | None) -> None:
    """Takes the C++ compiler along, which would otherwise compile on for nobody."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking down an interpreter that has all of Inductor loaded takes a second.
    os._exit(0)
