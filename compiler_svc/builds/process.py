"""The build process, from its fork to its end. It sends its news to the service, one JSON document in each packet."""

from __future__ import annotations

import socket
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

import structlog

from bundle.errors import KilnError
from bundle.host.shortage import find_shortage
from compiler_svc.builds.build import Forkservers
from compiler_svc.builds.job import BuildJob, JobAnswer, JobDirectory
from compiler_svc.builds.pipeline import run_build
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import BuildFailed
from compiler_svc.models.registry import list_families
from compiler_svc.records import Stage
from edge.logs import configure_logging
from execution.executors.executor import preload as preload_executor
from execution.forkserver.client import ForkserverClient
from execution.forkserver.task import decode, serve_order
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


def run_job(path: str, order_fd: int, answer_fd: int, news_fd: int, *forkserver_fds: int) -> None:
    """Runs the job of an order.

    `forkserver_fds` are connections to the forkserver of builds, which has also loaded what ranks and text processes
    need, and to that of lowerings. Ranks set their number of threads themselves, so the first serves ranks of any kind.
    """
    configure_logging("compiler-build")
    directory = JobDirectory(Path(path))
    builds, lowerings = (ForkserverClient(socket.socket(fileno=fd)) for fd in forkserver_fds)
    forkservers = Forkservers(ranks=lambda _num_threads, _executable_format: builds, lowerings=lowerings, texts=builds)
    with socket.socket(fileno=news_fd) as news, directory.working():
        report = ProgressReport(lambda told: news.sendall(told.to_json()))

        def build(order: bytes) -> JobAnswer:
            return JobAnswer(result=run_build(decode(order, BuildJob), directory, report, forkservers))

        serve_order(order_fd, answer_fd, build, explain=lambda error: explain(error, report.stage))


def explain(error: BaseException, stage: Stage) -> KilnError:
    """Names an error that ended a build in a stage."""
    with suppress(Exception):  # an error whose text is one more error
        if isinstance(error, Exception) and (shortage := find_shortage(error)) is not None:
            return shortage
    structlog.get_logger("build").error("build failed", exc_info=error)
    return BuildFailed.by(error, f"in the stage {stage}")
