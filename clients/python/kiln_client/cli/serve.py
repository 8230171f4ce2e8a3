"""The command `kiln serve`."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import click
from rich.text import Text

from kiln_client.cli.local_models import PreparationView, find_here, model_options, prepare, read_given
from kiln_client.cli.records import record_from_message
from kiln_client.cli.session import Session, local_command
from kiln_client.endpoint import DEFAULT_ADDRESSES
from kiln_client.local.lookup import Checkpoint
from kiln_client.stack.home import read_record
from kiln_client.stack.local_stack import local_config
from kiln_client.stack.stack import StackAddresses, run_stack

_BATCH_SIZE = 4


@click.command("serve")
@click.argument("model")
@click.option(
    "--compiler-address",
    default=DEFAULT_ADDRESSES["KILN_COMPILER"],
    show_default=True,
    metavar="HOST:PORT",
    help="Address at which the compiler listens; port 0 takes a free port.",
)
@click.option(
    "--runtime-address",
    default=DEFAULT_ADDRESSES["KILN_RUNTIME"],
    show_default=True,
    metavar="HOST:PORT",
    help="Address at which the runtime listens; port 0 takes a free port.",
)
@click.option("--memory", metavar="SIZE", help="Memory for deployments, such as 6GiB. Default: the runtime chooses.")
@model_options
@local_command
async def serve_command(
    session: Session,
    *,
    model: str,
    compiler_address: str,
    runtime_address: str,
    memory: str | None,
    home: Path,
    model_roots: tuple[Path, ...],
    config: BinaryIO | None,
    overrides: tuple[str, ...],
    optimization_level: str | None,
    yes: bool,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Starts both services, compiles MODEL if the cache lacks it, loads it, and prints `ready deployment=ID
    runtime=HOST:PORT compiler=HOST:PORT`. Four requests run at once.

    MODEL is a bundle (NAME, NAME:vN, NAME@ALIAS or sha256:HEX), the name of a directory below a model root, a path that
    begins with `.` or `/`, or ORG/NAME of the Hugging Face Hub.
    """
    given = read_given(config, overrides, optimization_level)
    stack = local_config(
        home, model_roots, compiler_address=compiler_address, runtime_address=runtime_address, memory=memory
    )
    found = find_here(session.output, model, stack.all_model_roots, home, yes=yes)
    if isinstance(found, Checkpoint):
        stack = stack.with_model_roots(found.roots)

    async def serve(addresses: StackAddresses) -> None:
        services = read_record(home)
        assert services is not None, "this process has announced them"
        with PreparationView(session.output) as view:
            deployment = await prepare(services, found or model, given, _BATCH_SIZE, view, may_replace=True)
        record = {"compiler": addresses.compiler, "runtime": addresses.runtime}
        session.output.event("ready", {"deployment": record_from_message(deployment), **record})
        words = {"deployment": deployment.id, "runtime": addresses.runtime, "compiler": addresses.compiler}
        session.output.text(f"ready {' '.join(f'{name}={value}' for name, value in words.items())}\n")

    await run_stack(stack, lambda _: None, serve)
    session.output.result({"event": "stopped"}, Text("stopped"))
