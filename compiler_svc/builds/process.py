"""The build process, from its fork to its end.

Reads the job from its directory, sends its news to the service, one JSON document in each packet, and leaves the
outcome in the directory.
"""

from __future__ import annotations

import os
import socket
from importlib import import_module
from pathlib import Path
from typing import Final

import structlog

from bundle.errors import KilnError
from bundle.shortage import find_shortage, name_shortage
from compiler_svc.builds.build import Forkservers
from compiler_svc.builds.job import NO_ROOM_EXIT_CODE, BuildOutcome, JobDirectory
from compiler_svc.builds.pipeline import run_build
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import BuildFailed
from compiler_svc.models.registry import list_families
from compiler_svc.records import BuildNews
from edge.logs import configure_logging
from execution.executors.executor import preload as preload_executor
from execution.failure import Failure
from execution.forkserver.client import ForkserverClient
from targets.cpu import EXPORTED_PROGRAM

#: Modules that every build imports, besides its own code, or the text process that it starts.
_LOADED: Final = (
    "torch.export._trace",
    "compiler_svc.builds.tokenizer_converter",
    "execution.text.process",
    *(family.reference.partition(":")[0] for family in list_families().values()),
)


def preload() -> None:
    """Imports the modules that builds and the ranks of their golden checks need, besides those of this module."""
    for module in _LOADED:
        import_module(module)
    preload_executor(EXPORTED_PROGRAM.name)


def run_job(path: str, progress_fd: int, builds_fd: int, lowerings_fd: int) -> None:
    """Runs the job of a directory.

    Args:
        path: The directory.
        progress_fd: The socket that receives the build's news.
        builds_fd: Connection to the forkserver of builds, which has also loaded what ranks and text processes need.
            Ranks set their number of threads themselves, so it serves ranks of any kind.
        lowerings_fd: Connection to the forkserver of lowerings.
    """
    configure_logging("compiler-build")
    directory = JobDirectory(Path(path))
    builds, lowerings = (ForkserverClient(socket.socket(fileno=fd)) for fd in (builds_fd, lowerings_fd))
    forkservers = Forkservers(ranks=lambda _num_threads, _executable_format: builds, lowerings=lowerings, texts=builds)
    with socket.socket(fileno=progress_fd) as progress, directory.working():
        outcome = _build(directory, progress, forkservers)
        try:
            # What the build has written there may be what fills the disk.
            directory.free()
            directory.write_outcome(outcome)
        except OSError as error:
            if name_shortage(error) is None:
                raise
            structlog.get_logger("build").exception("there is no room for the outcome")
            os._exit(NO_ROOM_EXIT_CODE)


def _build(directory: JobDirectory, progress: socket.socket, forkservers: Forkservers) -> BuildOutcome:
    def send(news: BuildNews) -> None:
        progress.send(news.to_json())

    try:
        job = directory.read_job()
        return BuildOutcome(result=run_build(job, directory, ProgressReport(send), forkservers))
    except KilnError as error:
        return BuildOutcome(error=Failure.of(error))
    except Exception as error:  # noqa: BLE001 - the last line before the service
        if (shortage := find_shortage(error)) is not None:
            return BuildOutcome(error=Failure.of(shortage))
        structlog.get_logger("build").exception("build failed")
        return BuildOutcome(
            error=Failure.of(BuildFailed(f"{type(error).__name__}, which the compiler's log describes"))
        )
