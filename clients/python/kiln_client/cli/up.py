"""`kiln up`."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.text import Text

from kiln_client.cli.parameters import SECONDS
from kiln_client.cli.session import Session, local_command
from kiln_client.endpoint import DEFAULT_ADDRESSES
from kiln_client.stack.stack import StackAddresses, StackConfig, run_stack

_HOME = click.Path(file_okay=False, resolve_path=True, path_type=Path)
_MODEL_ROOT = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)


@click.command("up")
@click.option("--home", type=_HOME, default=".kiln", show_default=True, help="Directory of all state.")
@click.option(
    "--compiler-address",
    default=DEFAULT_ADDRESSES["KILN_COMPILER"],
    show_default=True,
    metavar="HOST:PORT",
    help="Where the compiler listens; port 0 takes a free one.",
)
@click.option(
    "--runtime-address",
    default=DEFAULT_ADDRESSES["KILN_RUNTIME"],
    show_default=True,
    metavar="HOST:PORT",
    help="Where the runtime listens; port 0 takes a free one.",
)
@click.option("--cores", type=click.IntRange(min=1), help="Logical cores of the runtime. Default: those of this host.")
@click.option(
    "--model-root",
    "model_roots",
    type=_MODEL_ROOT,
    multiple=True,
    help="Directory of checkpoints, besides HOME/models; may be repeated.",
)
@click.option("--ready-timeout", type=SECONDS, default=120, show_default=True, help="Seconds to become healthy.")
@click.option("--stop-timeout", type=SECONDS, default=45, show_default=True, help="Seconds to end before being killed.")
@local_command
async def up_command(
    session: Session,
    *,
    home: Path,
    compiler_address: str,
    runtime_address: str,
    cores: int | None,
    model_roots: tuple[Path, ...],
    ready_timeout: float,
    stop_timeout: float,
) -> None:
    """Start both services on this host.

    Prints `ready compiler=HOST:PORT runtime=HOST:PORT` when both are healthy, stays until SIGTERM or Ctrl-C. Logs are
    in HOME/logs. When one service dies, the other is stopped and the command fails.
    """
    config = StackConfig(
        home=home,
        compiler_address=compiler_address,
        runtime_address=runtime_address,
        num_cores=cores or os.cpu_count() or 1,
        model_roots=model_roots,
        ready_timeout_s=ready_timeout,
        stop_timeout_s=stop_timeout,
    )

    def ready(addresses: StackAddresses) -> None:
        session.output.event("ready", {"compiler": addresses.compiler, "runtime": addresses.runtime})
        session.output.text(f"ready compiler={addresses.compiler} runtime={addresses.runtime}\n")

    await run_stack(config, ready)
    session.output.result({"event": "stopped"}, Text("stopped"))
