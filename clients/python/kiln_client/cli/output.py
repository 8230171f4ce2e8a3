"""Writes all output of a command, for a person or, with `--json`, for a program.

Results go to standard output; progress, remarks and errors go to standard error. With `--json`, all output is one JSON
object per line on standard output, and the result or the error comes last. Only output to a terminal is coloured.
"""

from __future__ import annotations

import json
import sys
from textwrap import indent

import click
from rich.console import Console, RenderableType
from rich.text import Text

from kiln_client.cli.advice import advise
from kiln_client.cli.records import Record, record_from_error
from kiln_client.errors import KilnError

_WIDE = 10_000  # columns of an output other than a terminal, so that tables are not cut


class Output:
    """The output of one command. `remarks` is on standard error, for progress and remarks to a person."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._is_mid_line = False
        self.remarks = Console(stderr=True, highlight=False, markup=False)
        self._results = Console(
            highlight=False, markup=False, soft_wrap=False, width=None if sys.stdout.isatty() else _WIDE
        )

    def event(self, kind: str, record: Record) -> None:
        """Writes an event for a program. For people, each command shows it in its own way."""
        if self.as_json:
            self._line({"event": kind, **record})

    def text(self, text: str) -> None:
        """Shows a piece of a text stream to a person, without buffering."""
        if not self.as_json and text:
            click.echo(text, nl=False)
            self._is_mid_line = not text.endswith("\n")

    def end_text(self) -> None:
        """Ends the text stream's last line."""
        if self._is_mid_line:
            self.text("\n")

    def remark(self, text: str) -> None:
        """Shows a remark to a person, besides the result."""
        if not self.as_json:
            self.remarks.print(text, style="dim", soft_wrap=True)

    def result(self, record: Record, view: RenderableType | None = None) -> None:
        """Writes the result, which comes last: the record for a program, the view for a person."""
        if self.as_json:
            self._line(record)
        elif view is not None:
            with self._results.capture() as capture:
                self._results.print(view)
            # Strips the blanks that fill the columns of tables, so that the reader of a pipe need not.
            click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def error(self, error: KilnError) -> None:
        """Writes the error, which comes last."""
        if self.as_json:
            self._line({"error": record_from_error(error)})
            return
        lines = Text.assemble(("error: ", "bold red"), (f"{error.code}/{error.reason}", "bold"))
        if not error.fields or not all(str(violation) in error.message for violation in error.fields):
            lines.append(indent(f"\n{error.message.strip()}", "  "))
        for violation in error.fields:
            if violation.field:
                lines.append(f"\n  {violation.field}", style="bold")
            lines.append(indent(f"\n{violation.description}", "    " if violation.field else "  "))
        if error.retry_after_s is not None:
            lines.append(f"\n  try again in {error.retry_after_s:g} s")
        if advice := advise(error.reason):
            lines.append(f"\n  {advice}")
        self.remarks.print(lines, soft_wrap=True)

    def _line(self, record: Record) -> None:
        click.echo(json.dumps(record, allow_nan=False))
