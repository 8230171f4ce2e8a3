"""Options of the commands that work on a home, start its services, or make a model ready there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import click

from kiln_client.cli.local.configuration import Given
from kiln_client.cli.parameters import DOCUMENT, OVERRIDE, QUANTIZE, read_configuration
from kiln_client.cli.session import Decorator, add_options
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

_OPTIONS = (
    HOME,
    MODEL_ROOTS,
    click.option(
        "--config",
        type=DOCUMENT,
        help="Configuration, as for `kiln compile`. Default: from the checkpoint and the memory.",
    ),
    OVERRIDE,
    QUANTIZE,
    click.option(
        "-O",
        "--optimization-level",
        type=click.Choice(["0", "1", "2"]),
        help="As for `kiln compile`: 0 compiles at once, runs slowly and needs no C++ compiler. Default: 1.",
    ),
    YES,
)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a person says of a model besides its name.

    `model_roots` are directories of checkpoints besides the home's; `yes` downloads without asking.
    """

    home: Path
    model_roots: tuple[Path, ...]
    given: Given
    yes: bool

    def with_adapter(self, name: str, path: Path) -> ModelChoice:
        """The choice of the model with an adapter, which the compiler must be able to read."""
        return replace(
            self, model_roots=(*self.model_roots, path.parent), given=self.given.with_adapter(name, str(path))
        )


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say where a model is and how it is compiled; the function takes them as `choice`."""

    @functools.wraps(function)
    def run(
        *,
        home: Path,
        model_roots: tuple[Path, ...],
        config: BinaryIO | None,
        overrides: tuple[str, ...],
        quantize: str | None,
        optimization_level: str | None,
        yes: bool,
        **others: Any,
    ) -> Any:
        level = None if optimization_level is None else int(optimization_level)
        document = read_configuration(config, overrides, quantize)
        given = Given(document, is_file=config is not None, optimization_level=level)
        return function(choice=ModelChoice(home, model_roots, given, yes), **others)

    return add_options(_OPTIONS)(run)
