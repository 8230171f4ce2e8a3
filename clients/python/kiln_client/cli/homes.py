"""Options of the commands that work on a home directory."""

from __future__ import annotations

from pathlib import Path

import click

from kiln_client.stack.home import default_home

HOME = click.option(
    "--home",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    default=default_home,
    envvar="KILN_HOME",
    show_envvar=True,
    help="Directory for all state. Default: $XDG_DATA_HOME/kiln, then ~/.local/share/kiln.",
)
YES = click.option("--yes", is_flag=True, help="Download a model of the Hub without asking.")
