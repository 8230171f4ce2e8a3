"""Options of the commands that work on a home directory, or start its services."""

from __future__ import annotations

from pathlib import Path

import click

from kiln_client.cli.option_rows import Decorator
from kiln_client.endpoint import DEFAULT_ADDRESSES
from kiln_client.stack.home import HOME_VARIABLE, default_home

DIRECTORY = click.Path(file_okay=False, resolve_path=True, path_type=Path)
EXISTING_DIRECTORY = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)

HOME = click.option(
    "--home",
    type=DIRECTORY,
    default=default_home,
    envvar=HOME_VARIABLE,
    show_envvar=True,
    help="Directory for all state. Default: $XDG_DATA_HOME/kiln, then ~/.local/share/kiln.",
)
YES = click.option("--yes", is_flag=True, help="Download a model of the Hub without asking.")
MODEL_ROOTS = click.option(
    "--model-root",
    "model_roots",
    type=EXISTING_DIRECTORY,
    multiple=True,
    help="Directory of checkpoints, beside HOME/models; may be repeated.",
)
MEMORY = click.option(
    "--memory", metavar="SIZE", help="Memory for deployments, such as 6GiB. Default: the runtime chooses."
)


def _address(service: str) -> Decorator:
    return click.option(
        f"--{service}-address",
        default=DEFAULT_ADDRESSES[f"KILN_{service.upper()}"],
        show_default=True,
        metavar="HOST:PORT",
        help=f"Address at which the {service} listens; port 0 takes a free port.",
    )


#: Where the services of a command listen.
ADDRESSES = tuple(_address(service) for service in ("compiler", "runtime"))
