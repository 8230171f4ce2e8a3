"""The command `kiln serve`."""

from __future__ import annotations

import click
from rich.text import Text

from kiln_client.cli.homes import ADDRESSES, MEMORY
from kiln_client.cli.local_models import ModelChoice, PreparationView, find_here, model_options, prepare
from kiln_client.cli.option_rows import add_options
from kiln_client.cli.records import record_from_message
from kiln_client.cli.session import Session, local_command
from kiln_client.local.lookup import Checkpoint
from kiln_client.stack.home import read_record
from kiln_client.stack.local_stack import local_config
from kiln_client.stack.stack import StackAddresses, run_stack

_BATCH_SIZE = 4


@click.command("serve")
@click.argument("model")
@add_options((*ADDRESSES, MEMORY))
@model_options
@local_command
async def serve_command(
    session: Session,
    *,
    model: str,
    compiler_address: str,
    runtime_address: str,
    memory: str | None,
    choice: ModelChoice,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Starts both services, compiles MODEL if the cache lacks it, loads it, and prints `ready deployment=ID
    runtime=HOST:PORT compiler=HOST:PORT`. Four requests run at once.

    MODEL is a bundle (NAME, NAME:vN, NAME@ALIAS or sha256:HEX), the name of a directory below a model root, a path that
    begins with `.` or `/`, or ORG/NAME of the Hugging Face Hub.
    """
    stack = local_config(
        choice.home,
        choice.model_roots,
        compiler_address=compiler_address,
        runtime_address=runtime_address,
        memory=memory,
    )
    found = find_here(session.output, model, stack.all_model_roots, choice.home, yes=choice.yes)
    if isinstance(found, Checkpoint):
        stack = stack.with_model_roots(found.roots)

    async def serve(addresses: StackAddresses) -> None:
        services = read_record(choice.home)
        assert services is not None, "this process has announced them"
        with PreparationView(session.output) as view:
            deployment = await prepare(services, found or model, choice.given, _BATCH_SIZE, view, may_replace=True)
        record = {"compiler": addresses.compiler, "runtime": addresses.runtime}
        session.output.event("ready", {"deployment": record_from_message(deployment), **record})
        words = {"deployment": deployment.id, "runtime": addresses.runtime, "compiler": addresses.compiler}
        session.output.text(f"ready {' '.join(f'{name}={value}' for name, value in words.items())}\n")

    await run_stack(stack, lambda _: None, serve)
    session.output.result({"event": "stopped"}, Text("stopped"))
