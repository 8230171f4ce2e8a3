"""Shows the progress of compiles, loads and imports.

On a terminal it is a bar, elsewhere a line per step and, while a step takes long, a line from time to time; with
`--json` it is an event per change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message
from kiln.bundle.v1.bundle_pb2 import ImportProgress
from kiln.compiler.v1.compiler_pb2 import CompileMetadata, CompileStage
from kiln.runtime.v1.runtime_pb2 import LoadProgress
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.text import Text

from kiln_client.cli.output import Output
from kiln_client.cli.records import record_from_message
from kiln_client.enums import enum_name
from kiln_client.errors import Unavailable


@dataclass(frozen=True, slots=True)
class ProgressState:
    """The progress of one compile, load or import.

    Attributes:
        total: Units in total; 0 if unknown.
        count: `done` and `total` as text for a person; empty if there are no units.
        step: Text that changes when a log should get a new line: often enough to follow, seldom enough to read.
        eta_s: Estimated seconds to the end of the stage; None while unknown.
    """

    stage: str
    done: int
    total: int
    count: str
    step: str
    remark: str
    eta_s: float | None = None


def compile_state(progress: CompileMetadata) -> ProgressState:
    """Reads the progress of a compile, in executables or, while it shards weights, in bytes."""
    stage = enum_name(CompileStage.DESCRIPTOR, progress.stage)
    eta_s = progress.eta.ToTimedelta().total_seconds() if progress.HasField("eta") else None
    if progress.stage == CompileStage.COMPILE_STAGE_SHARD:
        return _bytes_state(stage, progress.sharded_bytes, progress.total_bytes, progress.message)
    done, total = progress.executables_done, progress.executables_total
    count = f"{done}/{total} executables" if total else ""
    # Executables count towards the end of one stage; nothing says how far another one is.
    countable = total if progress.stage == CompileStage.COMPILE_STAGE_LOWER else 0
    return ProgressState(stage, done, countable, count, f"{stage} {count}", progress.message, eta_s)


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


class Countdown:
    """An estimate of the time to an end, which runs down until the next. Times are seconds of a monotonic clock."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self._ends_s: float | None = None

    def estimate(self, now_s: float, eta_s: float | None) -> None:
        """Takes an estimate."""
        self._ends_s = None if eta_s is None else now_s + eta_s

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds that are left; None if nothing was estimated, or the estimated end has passed."""
        return None if self._ends_s is None or now_s >= self._ends_s else self._ends_s - now_s

    def share(self, now_s: float) -> float | None:
        """The part of the time that has passed, below 1; None if nothing was estimated."""
        if self._ends_s is None:
            return None
        elapsed_s = now_s - self.started_s
        # What takes longer than estimated comes closer to the end, and never reaches it.
        left_s = max(self._ends_s - now_s, 0.05 * elapsed_s)
        return elapsed_s / (elapsed_s + left_s) if elapsed_s > 0 else 0.0

    def text(self, now_s: float) -> str:
        """Says how much is left; empty if that is unknown."""
        remaining_s = self.remaining_s(now_s)
        if remaining_s is None:
            return ""
        minutes, seconds = divmod(round(remaining_s), 60)
        return f"about {minutes} min {seconds} s left" if minutes else f"about {seconds} s left"


class _CountdownBar(BarColumn):
    """A bar that moves with the time if that is estimated, and otherwise with what is done."""

    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        share = task.fields["countdown"].share(task.get_time())
        if share is not None and task.total:
            bar.update(max(share, task.completed / task.total), 1.0)
        return bar


class _CountdownText(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["countdown"].text(task.get_time()), style="dim")


class ProgressView:
    """Shows progress while it is open. Open it on a running event loop.

    Without a terminal, a line says every `heartbeat_s` seconds that the work goes on.
    """

    def __init__(self, output: Output, *, heartbeat_s: float = 15.0) -> None:
        self._output = output
        self._heartbeat_s = heartbeat_s
        self._shown = ""
        self._state: ProgressState | None = None
        self._countdown = Countdown(monotonic())
        self._opened_s = self._changed_s = monotonic()
        self._heartbeat: asyncio.Task[None] | None = None
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

    def configured(self, document: Mapping[str, Any], derived: Mapping[str, object]) -> None:
        """Shows a configuration, to a person the values that no person gave: `derived`, by attribute."""
        self._output.event("configured", {"config": dict(document)})
        values = ", ".join(f"{name} {_value_text(value)}" for name, value in derived.items())
        self._output.remark(f"configuration: {values}" if values else "configuration: as given")

    def unloaded(self, deployment_id: str) -> None:
        """Says what made room for a load."""
        self._output.event("unloaded", {"deployment_id": deployment_id})
        self._output.remark(f"unloaded {deployment_id}, which was idle, to make room")

    def lost(self, error: Unavailable) -> None:
        """Shows that the connection was lost and will be opened again."""
        self._output.event("reconnecting", {"reason": error.reason, "message": error.message})
        self._shown = ""
        self._output.remark(f"{error.message}; trying again")

    def _show(self, message: Message, state: ProgressState) -> None:
        self._output.event("progress", record_from_message(message))
        now_s = monotonic()
        if self._state is None or self._state.stage != state.stage:
            self._countdown = Countdown(now_s)
        self._countdown.estimate(now_s, state.eta_s)
        self._state = state
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                description=state.stage,
                completed=state.done,
                total=state.total or None,
                count=state.count,
                remark=state.remark,
                countdown=self._countdown,
            )
        elif state.step != self._shown:
            self._shown = state.step
            self._changed_s = now_s
            self._output.remark(self._line(state, state.remark, self._countdown.text(now_s)))

    @staticmethod
    def _line(state: ProgressState, *remarks: str) -> str:
        known = ", ".join(remark for remark in remarks if remark)
        return " ".join(part for part in (state.stage, state.count, known) if part)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            now_s = monotonic()
            if self._state is not None and now_s - self._changed_s >= self._heartbeat_s:
                elapsed = f"{now_s - self._opened_s:.0f} s so far"
                self._output.remark(self._line(self._state, elapsed, self._countdown.text(now_s)))

    def __enter__(self) -> Self:
        if self._output.remarks.is_terminal and not self._output.as_json:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                _CountdownBar(),
                TextColumn("{task.fields[count]}", markup=False),
                TimeElapsedColumn(),
                _CountdownText(),
                TextColumn("{task.fields[remark]}", markup=False, style="dim"),
                console=self._output.remarks,
                get_time=monotonic,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, count="", remark="", countdown=self._countdown)
            self._bar.start()
        elif not self._output.as_json:
            self._heartbeat = asyncio.get_running_loop().create_task(self._beat())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._heartbeat is not None:
            self._heartbeat.cancel()


def _value_text(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case list():
            return "/".join(map(str, value))
        case dict():
            return " ".join(f"{name} {_value_text(one)}" for name, one in value.items())
        case _:
            return str(value)
