"""Shows the progress of compiles, loads and imports.

On a terminal it is a bar, elsewhere a line per step, with `--json` an event per change.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from google.protobuf.message import Message
from kiln.bundle.v1.bundle_pb2 import ImportProgress
from kiln.compiler.v1.compiler_pb2 import CompileMetadata, CompileStage
from kiln.runtime.v1.runtime_pb2 import LoadProgress
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kiln_client.cli.output import Output
from kiln_client.cli.records import record_from_message
from kiln_client.enums import enum_name
from kiln_client.errors import Unavailable


@dataclass(frozen=True, slots=True)
class ProgressState:
    """The progress of one compile, load or import.

    Attributes:
        stage: Name of the present stage.
        done: Units done.
        total: Units in total; 0 if unknown.
        count: `done` and `total` as text for a person; empty if there are no units.
        step: Text that changes when a log should get a new line: often enough to follow, seldom enough to read.
        remark: One line for a person.
    """

    stage: str
    done: int
    total: int
    count: str
    step: str
    remark: str


def compile_state(progress: CompileMetadata) -> ProgressState:
    """Reads the progress of a compile, in executables or, while it shards weights, in bytes."""
    stage = enum_name(CompileStage.DESCRIPTOR, progress.stage)
    eta = f"about {progress.eta.ToTimedelta().total_seconds():.0f} s left" if progress.HasField("eta") else ""
    remark = ", ".join(part for part in (progress.message, eta) if part)
    if progress.stage == CompileStage.COMPILE_STAGE_SHARD:
        return _bytes_state(stage, progress.sharded_bytes, progress.total_bytes, remark)
    done, total = progress.executables_done, progress.executables_total
    count = f"{done}/{total} executables" if total else ""
    return ProgressState(stage, done, total, count, f"{stage} {count}", remark)


def load_state(progress: LoadProgress) -> ProgressState:
    """Reads the progress of a load."""
    stage = enum_name(LoadProgress.Stage.DESCRIPTOR, progress.stage)
    return _bytes_state(stage, progress.done_bytes, progress.total_bytes, "")


def import_state(progress: ImportProgress) -> ProgressState:
    """Reads the progress of an import."""
    return _bytes_state("copy", progress.done_bytes, progress.total_bytes, "")


def _bytes_state(stage: str, done: int, total: int, remark: str) -> ProgressState:
    count = f"{decimal(done)}/{decimal(total)}" if total else ""
    return ProgressState(stage, done, total, count, stage, remark)


class ProgressView:
    """Shows progress while it is open."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._shown = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def compiled(self, progress: CompileMetadata) -> None:
        """Shows the next state of a compile."""
        self._show(progress, compile_state(progress))

    def loaded(self, progress: LoadProgress) -> None:
        """Shows the next state of a load."""
        self._show(progress, load_state(progress))

    def imported(self, progress: ImportProgress) -> None:
        """Shows the next state of an import."""
        self._show(progress, import_state(progress))

    def lost(self, error: Unavailable) -> None:
        """Shows that the connection was lost and will be opened again."""
        self._output.event("reconnecting", {"reason": error.reason, "message": error.message})
        self._shown = ""
        self._output.remark(f"{error.message}; trying again")

    def _show(self, message: Message, state: ProgressState) -> None:
        self._output.event("progress", record_from_message(message))
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                description=state.stage,
                completed=state.done,
                total=state.total or None,
                count=state.count,
                remark=state.remark,
            )
        elif state.step != self._shown:
            self._shown = state.step
            self._output.remark(" ".join(part for part in (state.stage, state.count, state.remark) if part))

    def __enter__(self) -> Self:
        if self._output.remarks.is_terminal and not self._output.as_json:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[count]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("{task.fields[remark]}", markup=False, style="dim"),
                console=self._output.remarks,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, count="", remark="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
