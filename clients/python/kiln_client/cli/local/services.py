"""The commands on the services of a home: `kiln ps`, `kiln logs` and `kiln down`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final, Self

import click
from rich.console import Group
from rich.filesize import decimal
from rich.text import Text

from kiln_client.cli.local.background import stop_services
from kiln_client.cli.local.options import HOME
from kiln_client.cli.records import record_from_message
from kiln_client.cli.rows import Row, describe, pairs, tabulate
from kiln_client.cli.session import Session, local_command
from kiln_client.errors import FailedPrecondition, NotFound
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import read_record

_LOGS = ("compiler", "runtime", "gateway", "services")
_POLL_S = 0.2

_SERVICES: Final = (
    Row("process", "{pid}, in the {is_detached:background/foreground}"),
    Row("compiler", "{compiler}"),
    Row("runtime", "{runtime}"),
    Row("token", lambda record: str(record.token_path or "none")),
)
_MODELS: Final = (
    Row("deployment", "{id}"),
    Row("bundle", "{roles.bundle_ref}"),
    Row("state", "{state}"),
    Row("sequences", "{load.used_slots}/{load.total_slots}"),
    Row("tokens", "{capabilities.max_length}"),
    Row("memory", lambda deployment: decimal(deployment.weights_bytes + deployment.kv_bytes)),
)


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
        raise FailedPrecondition(
            f"no services run on {home}: `kiln run MODEL` starts them, and so does `kiln up --home {home}`",
            reason="SERVICES_NOT_RUNNING",
            metadata={"home": home},
        )
    async with AsyncRuntime(record.runtime, **record.connection) as runtime:
        deployments = await runtime.list_deployments()
    token = None if record.token_path is None else str(record.token_path)
    services = asdict(record) | {"home": str(home), "token_path": token}
    del services["tls"]
    session.output.result(
        {"services": services, "deployments": [record_from_message(one) for one in deployments]},
        Group(
            pairs([("home", home), *describe(record, _SERVICES)]),
            Text(),
            tabulate(deployments, _MODELS, empty="no models are loaded"),
        ),
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
        raise NotFound(f"there is no log in {home / 'logs'}", reason="LOG_NOT_FOUND", metadata={"home": home})
    with contextlib.ExitStack() as stack:
        tails = [stack.enter_context(LogTail(path)) for path in paths]
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
        # Open while it is followed, so that the file that replaces it has another inode.
        self._log = path.open("rb")

    def last(self, count: int) -> list[str]:
        """Returns the last `count` lines."""
        lines = [*self.new()]
        return lines[len(lines) - min(count, len(lines)) :]

    def new(self) -> Iterator[str]:
        """Yields the whole lines that were added since the last call."""
        status = self.path.stat()
        if not os.path.samestat(status, os.fstat(self._log.fileno())) or status.st_size < self._log.tell():
            self._log.close()
            self._log = self.path.open("rb")
        while (line := self._log.readline()).endswith(b"\n"):
            yield line.decode(errors="replace").rstrip("\n")
        self._log.seek(-len(line), os.SEEK_CUR)  # a line that has not ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()


def _show_line(session: Session, tail: LogTail, line: str, *, is_alone: bool) -> None:
    name = tail.path.stem
    session.output.event("line", {"service": name, "line": line})
    session.output.text(f"{line}\n" if is_alone else f"{name}: {line}\n")
