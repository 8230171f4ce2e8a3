"""What a build process does once it has been forked.

Reads the job from its directory, sends progress to the service, one JSON document a packet, and leaves the outcome in
the directory. Leads a process group, so that whatever it starts can be ended with it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog

from bundle.errors import KilnError
from compiler_svc.builds.build import Nurseries
from compiler_svc.builds.forked_nursery import open_nursery
from compiler_svc.builds.job import BuildOutcome, JobDirectory
from compiler_svc.builds.pipeline import run_build
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import BuildFailed
from compiler_svc.nurseries.nursery import Nursery
from compiler_svc.records import Progress
from edge.logs import configure_logging
from execution.failure import Failure
from execution.ranks.parent_death import die_with_parent


def run_job(path: Path, report: socket.socket, nursery_pid: int, lowerings: Nursery) -> None:
    """Runs the job of a directory.

    Args:
        report: Where progress goes.
        nursery_pid: The process that this one was forked from, and ends with.
        lowerings: Where lowerings run.
    """
    signal.signal(signal.SIGTERM, _end_process_group)
    die_with_parent(signal.SIGTERM, nursery_pid)
    configure_logging("compiler-build")
    directory = JobDirectory(path)
    with directory.working():
        directory.write_outcome(_build(directory, report, lowerings))


def _build(directory: JobDirectory, report: socket.socket, lowerings: Nursery) -> BuildOutcome:
    try:
        job = directory.read_job()
        with open_nursery(job, report) as ranks:
            nurseries = Nurseries(ranks, lowerings)
            return BuildOutcome(result=run_build(job, directory, ProgressReport(_sender(report)), nurseries))
    except KilnError as error:
        return BuildOutcome(error=Failure.of(error))
    except Exception as error:  # noqa: BLE001 - the last line before the service
        structlog.get_logger("build").exception("build failed")
        return BuildOutcome(
            error=Failure.of(BuildFailed(f"{type(error).__name__}, which the compiler's log describes"))
        )


def _sender(report: socket.socket) -> Callable[[Progress], None]:
    def send(progress: Progress) -> None:
        report.send(progress.to_json())

    return send


def _end_process_group(_signal: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)
