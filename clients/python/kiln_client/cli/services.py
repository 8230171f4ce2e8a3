"""The commands on the services of a home: `kiln ps`, `kiln logs` and `kiln down`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
from kiln.runtime.v1.runtime_pb2 import Deployment
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from kiln_client.cli.homes import HOME
from kiln_client.cli.records import record_from_message
from kiln_client.cli.session import Session, local_command
from kiln_client.cli.views import pairs, rows
from kiln_client.enums import enum_name
from kiln_client.errors import NotFound, ServicesNotRunning
from kiln_client.local.services import stop_services
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import StackRecord, read_record

_LOGS = ("compiler", "runtime", "gateway", "services")
_POLL_S = 0.2


@click.command("down")
@HOME
@local_command
async def down_command(session: Session, *, home: Path) -> None:
    """End the services of a home, and wait until they have ended.

    Bundles and caches stay, and the next services load the same deployments. If no services run, the command has
    no effect.
    """
    record = read_record(home)
    if record is not None:
        await stop_services(home, record)
    text = f"the services of {home} have ended" if record else f"no services run on {home}"
    session.output.result({"home": str(home), "stopped": record is not None}, Text(text))


@click.command("ps")
@HOME
@local_command
async def ps_command(session: Session, *, home: Path) -> None:
    """Show the services of a home, and the models that they have loaded."""
    record = read_record(home)
    if record is None:
        raise ServicesNotRunning(home)
    async with AsyncRuntime(record.runtime, **record.connection) as runtime:
        deployments = await runtime.list_deployments()
    token = None if record.token_path is None else str(record.token_path)
    services = asdict(record) | {"home": str(home), "token_path": token}
    del services["tls"]
    session.output.result(
        {"services": services, "deployments": [record_from_message(one) for one in deployments]},
        Group(_services_view(home, record), Text(), _models_view(deployments)),
    )


@click.command("logs")
@click.argument("service", type=click.Choice(_LOGS), required=False)
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Lines to show of each.")
@click.option("-f", "--follow", is_flag=True, help="Show new lines until Ctrl-C.")
@HOME
@local_command
async def logs_command(session: Session, *, service: str | None, lines: int, follow: bool, home: Path) -> None:
    """Show the last lines of the services' logs, or of one of them.

    `services` is the log of the process that starts and stops the other two in the background.
    """
    names = _LOGS if service is None else (service,)
    paths = [path for name in names if (path := home / "logs" / f"{name}.log").is_file()]
    if not paths:
        raise NotFound(f"there is no log in {home / 'logs'}", reason="LOG_NOT_FOUND", metadata={"home": str(home)})
    tails = [LogTail(path) for path in paths]
    for tail in tails:
        for line in tail.last(lines):
            _show_line(session, tail, line, is_alone=len(tails) == 1)
    while follow:
        await asyncio.sleep(_POLL_S)
        for tail in tails:
            for line in tail.new():
                _show_line(session, tail, line, is_alone=len(tails) == 1)


class LogTail:
    """Reads the end of a log, and then what is added to it. A log that was replaced is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._offset = 0

    def last(self, count: int) -> list[str]:
        """Returns the last `count` lines."""
        lines = [*self.new()]
        return lines[len(lines) - min(count, len(lines)) :]

    def new(self) -> Iterator[str]:
        """Yields the whole lines that were added since the last call."""
        with self.path.open("rb") as log:
            status = os.fstat(log.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            log.seek(self._offset)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                yield line.decode(errors="replace").rstrip("\n")


def _show_line(session: Session, tail: LogTail, line: str, *, is_alone: bool) -> None:
    name = tail.path.stem
    session.output.event("line", {"service": name, "line": line})
    session.output.text(f"{line}\n" if is_alone else f"{name}: {line}\n")


def _services_view(home: Path, record: StackRecord) -> RenderableType:
    how = "in the background" if record.is_detached else "in the foreground"
    return pairs(
        (
            ("home", home),
            ("process", f"{record.pid}, {how}"),
            ("compiler", record.compiler),
            ("runtime", record.runtime),
            ("token", record.token_path or "none"),
        )
    )


def _models_view(deployments: list[Deployment]) -> RenderableType:
    if not deployments:
        return Text("no models are loaded", style="dim")
    return rows(
        ("deployment", "bundle", "state", "sequences", "tokens", "memory"),
        (
            (
                one.id,
                ", ".join(role.bundle_ref for role in one.roles),
                enum_name(Deployment.State.DESCRIPTOR, one.state),
                f"{one.load.used_slots}/{one.load.total_slots}",
                one.capabilities.max_length,
                decimal(one.weights_bytes + one.kv_bytes),
            )
            for one in deployments
        ),
    )
