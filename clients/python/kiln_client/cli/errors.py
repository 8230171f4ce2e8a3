"""The command `kiln errors`."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from kiln_client.cli.advice import advise
from kiln_client.cli.session import Session, local_command

#: What is known of errors, row by row. `make docs` writes the first file, from the services' code.
_FILES: Final = ("service_errors.json", "client_errors.json")


@click.command("errors")
@click.argument("reason", required=False)
@local_command
async def errors_command(session: Session, *, reason: str | None) -> None:
    """List the reasons that errors give, or explain one.

    \b
    kiln errors               every reason with its gRPC code
    kiln errors QUEUE_FULL    what it means, what to do, and the variables of its metadata
    """
    rows = [row for row in read_rows() if reason in (None, row["reason"])]
    if not rows:
        raise click.UsageError(f"got {reason!r}; accepted: a reason that `kiln errors` lists")
    if reason is None:
        table = Table(box=None, show_header=False, pad_edge=False)
        for row in rows:
            table.add_row(row["reason"], _codes(row))
        session.output.result({"errors": rows}, table)
    else:
        session.output.result({"errors": rows}, Text("\n\n").join(map(_explain, rows)))


def read_rows() -> list[dict[str, Any]]:
    """Returns what is known of the services' and the client's errors, by reason."""
    folder = files("kiln_client.cli")
    rows = [row for name in _FILES for row in json.loads(folder.joinpath(name).read_text())]
    return sorted(rows, key=lambda row: row["reason"])


def _codes(row: dict[str, Any]) -> str:
    """The codes of a row; an error without one ends its process."""
    return ", ".join(f"{code or 'ends the process'} {service}".rstrip() for service, code in row["codes"].items())


def _explain(row: dict[str, Any]) -> Text:
    advice = advise(row["reason"])
    if advice is None and row.get("may_repeat"):
        advice = "try again, after the time that the error names"
    elif advice is None and row.get("names_mistakes"):
        advice = "correct what the error names: it says for each field what is accepted"
    lines = Text.assemble((row["reason"], "bold"), f"  {_codes(row)}\n{row['meaning']}")
    lines.append(f"\n\nwhat to do  {advice or 'see the message of the error'}")
    if row.get("fields"):
        lines.append(f"\nmetadata    {', '.join(row['fields'])}")
    return lines
