"""The command `kiln doctor`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import click
from kiln.compiler.v1.compiler_pb2 import Target
from rich.status import Status
from rich.text import Text

from kiln_client.cli.output import Output
from kiln_client.cli.parameters import enum_choice
from kiln_client.cli.records import Record
from kiln_client.cli.session import Session, local_command
from kiln_client.doctor.checks import CHECKS, HOST_ROOT, Check, Examination, Outcome, choose_checks, examine
from kiln_client.doctor.report import write_report
from kiln_client.doctor.trial import CPU, OneLayerTrial

NOT_WELL: Final = 1
"""Exit code if a check has failed or did not run."""

_NEURON_PYTHON: Final = "KILN_COMPILER_NEURON_PYTHON"
_COLOURS: Final = {"ok": "green", "failed": "red", "not_run": "yellow"}
_HEARTBEAT_S: Final = 15.0


@click.command("doctor")
@click.option("--target", type=enum_choice(Target.Kind), default=CPU, show_default=True, help="Hardware to check for.")
@click.option(
    "--check",
    "names",
    multiple=True,
    metavar="NAME",
    help="Run only this check and those that it needs; may be repeated. Default: all.",
)
@click.option(
    "--neuron-python",
    type=click.Path(path_type=Path),
    envvar=_NEURON_PYTHON,
    show_envvar=True,
    help="Python with Neuron's packages. Default: the one that runs this command.",
)
@click.option("--compile-only", is_flag=True, help="Leave out what a host without a device cannot pass.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what every check found, logs, graphs, versions and variables, none with a secret, to this .tar.gz.",
)
@local_command
async def doctor_command(
    session: Session,
    *,
    target: str,
    names: tuple[str, ...],
    neuron_python: Path | None,
    compile_only: bool,
    report: Path | None,
) -> None:
    """Check whether this host compiles for a target and runs what it has compiled.

    The command looks for drivers, libraries, cores and packages, compiles a model of one layer, runs it, and compares
    its logits with those of transformers. Each check has a limit of time. What fails comes with what to do next. The
    exit code is 0 if every check is ok, and 1 otherwise.
    """
    known = [check.name for check in CHECKS[target]]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"got {name}; accepted for {target}: {', '.join(known)}", param_hint="'--check'")
    output = session.output
    interpreter = None if neuron_python is None else _absolute(neuron_python)
    environment = {} if interpreter is None else {_NEURON_PYTHON: interpreter}
    directory = Path(tempfile.mkdtemp(prefix="kiln-doctor-"))
    outcomes: list[Outcome] = []
    try:
        async with OneLayerTrial(directory, target, interpreter) as trial:
            examination = Examination(target, environment, trial, HOST_ROOT)
            with _Progress(output) as progress:
                checks = choose_checks(target, names, compile_only=compile_only)
                async for outcome in examine(examination, checks, progress.begin, progress.show):
                    progress.end(outcome)
                    outcomes.append(outcome)
        is_well = all(outcome.finding.status == "ok" for outcome in outcomes)
        record = {"event": "result", "target": target, "ok": is_well, "checks": [_record(one) for one in outcomes]}
        if report is not None:
            write_report(report, directory, record)
    finally:
        # Logs stay if an advice names one.
        if not any("log" in outcome.finding.details for outcome in outcomes):
            shutil.rmtree(directory, ignore_errors=True)
    output.result(record, Text(_conclude(outcomes, target)))
    if not is_well:
        raise click.exceptions.Exit(NOT_WELL)


class _Progress:
    """Shows the check that runs, and each one that has ended. Open it on a running event loop."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._check = ""
        self._text = ""
        self._begun_s = 0.0
        self._status: Status | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    def begin(self, check: Check) -> None:
        self._check, self._text, self._begun_s = check.name, "", time.monotonic()
        self._output.event("started", {"check": check.name, "limit_seconds": check.limit_s})
        self._refresh()
        if self._status is not None:
            self._status.start()

    def show(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._output.event("progress", {"check": self._check, "message": text})
            self._refresh()

    def end(self, outcome: Outcome) -> None:
        self._check = ""
        # While it is shown, it takes standard output, too.
        if self._status is not None:
            self._status.stop()
        self._output.event("check", _record(outcome))
        self._output.text(_render(outcome))

    def _refresh(self) -> None:
        if self._status is not None:
            self._status.update(f"{self._check} {self._text}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            elapsed_s = time.monotonic() - self._begun_s
            if self._check and elapsed_s >= _HEARTBEAT_S:
                parts = (f"{self._check}:", self._text, f"{elapsed_s:.0f} s so far")
                self._output.remark(" ".join(part for part in parts if part))

    def __enter__(self) -> Self:
        if self._output.remarks.is_terminal and not self._output.as_json:
            self._status = self._output.remarks.status("")
        elif not self._output.as_json:
            self._heartbeat = asyncio.get_running_loop().create_task(self._beat())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if self._heartbeat is not None:
            self._heartbeat.cancel()


def _absolute(path: Path) -> str:
    """Makes a path absolute. Links stay: the one of a virtual environment says which environment it is."""
    return str(path.absolute())


def _record(outcome: Outcome) -> Record:
    return {"check": outcome.name, **asdict(outcome.finding), "seconds": round(outcome.duration_s, 3)}


def _render(outcome: Outcome) -> str:
    finding = outcome.finding
    status = click.style(f"{finding.status.replace('_', ' '):<9}", fg=_COLOURS[finding.status])
    lines = [f"{status}{outcome.name:<9} {finding.summary}"]
    if finding.advice:
        lines.append(f"{'':<18} next: {finding.advice}")
    return "".join(f"{line}\n" for line in lines)


def _conclude(outcomes: Sequence[Outcome], target: str) -> str:
    counts = Counter(outcome.finding.status for outcome in outcomes)
    if counts["ok"] == len(outcomes):
        return f"every check for {target} is ok"
    return f"{target}: {counts['ok']} ok, {counts['failed']} failed, {counts['not_run']} not run"
