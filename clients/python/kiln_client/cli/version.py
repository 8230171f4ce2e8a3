"""The command `kiln version`."""

from __future__ import annotations

import platform

import click
import google.protobuf
import grpc
from rich.text import Text

from kiln_client.cli.session import Session, local_command
from kiln_client.version import __version__


@click.command("version")
@local_command
async def version_command(session: Session) -> None:
    """Show the version of this client."""
    versions = {
        "version": __version__,
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "protobuf": google.protobuf.__version__,
    }
    session.output.result(versions, Text(f"kiln {__version__}"))
