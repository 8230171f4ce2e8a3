"""The command `kiln up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from kiln.compiler.v1.compiler_pb2 import Target
from rich.text import Text

from kiln_client.cli.local.options import ADDRESSES, DIRECTORY, EXISTING_DIRECTORY, MEMORY, MODEL_ROOTS
from kiln_client.cli.parameters import SECONDS, enum_choice
from kiln_client.cli.session import Session, add_options, local_command
from kiln_client.stack.home import UP_HOME
from kiln_client.stack.stack import (
    DEFAULT_ISA,
    READY_TIMEOUT_S,
    STOP_TIMEOUT_S,
    StackAddresses,
    StackConfig,
    StackTls,
    run_stack,
)

_FILE = click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path)
#: Its links stay: the interpreter of a virtual environment is a link, and finds the environment by its own place.
_INTERPRETER = click.Path(exists=True, dir_okay=False, executable=True, path_type=Path)


# Each option has the name of the field of `StackConfig` that takes its value.
@click.command("up")
@click.option("--home", type=DIRECTORY, default=UP_HOME, show_default=True, help="Directory for all state.")
@add_options(ADDRESSES)
@click.option(
    "--target",
    type=enum_choice(Target.Kind),
    help="Hardware of this host, for whose bundles the runtime starts. No NeuronCore has been tried. Default: cpu.",
)
@click.option(
    "--cores", type=click.IntRange(min=1), help="Logical cores of the runtime. Default: all cores of this host."
)
@click.option(
    "--logical-core-size",
    type=click.IntRange(min=1),
    help="Physical NeuronCores of a logical one (LNC). Default: the runtime chooses, by the target.",
)
@click.option(
    "--neuron-python",
    type=_INTERPRETER,
    help="Python with Neuron's packages, which compiles for Neuron targets. Default: the compiler chooses.",
)
@click.option(
    "--threads-per-core",
    type=click.IntRange(min=1),
    help="Threads that each rank computes with. Default: the runtime chooses.",
)
@MEMORY
@click.option("--deployments", type=_FILE, help="File that declares the runtime's deployments.")
@click.option(
    "--capture-directory",
    type=DIRECTORY,
    help="Directory for captures of requests' inputs. Without it, the runtime refuses to capture.",
)
@MODEL_ROOTS
@click.option(
    "--import-root",
    "import_roots",
    type=EXISTING_DIRECTORY,
    multiple=True,
    help="Directory of OCI layouts that `kiln bundles import` may read; may be repeated.",
)
@click.option(
    "--default-isa",
    default=DEFAULT_ISA,
    show_default=True,
    help="CPU instruction set of compiles that name none: native, for bundles that this host runs, or x86-64-v3, for "
    "bundles that travel.",
)
@click.option("--tls-cert", type=_FILE, help="Serve TLS with this PEM certificate chain.")
@click.option("--tls-key", type=_FILE, help="PEM private key of --tls-cert.")
@click.option("--tls-ca", type=_FILE, help="PEM file of the authorities that issued --tls-cert.")
@click.option(
    "--tls-client-ca", type=_FILE, help="Require a certificate of clients, issued by an authority in this PEM file."
)
@click.option(
    "--require-auth", is_flag=True, help="Ask every client for a token, also on loopback; `kiln token` makes tokens."
)
@click.option(
    "--ready-timeout",
    "ready_timeout_s",
    type=SECONDS,
    default=READY_TIMEOUT_S,
    show_default=True,
    help="Seconds that the services have to become healthy.",
)
@click.option(
    "--stop-timeout",
    "stop_timeout_s",
    type=SECONDS,
    default=STOP_TIMEOUT_S,
    show_default=True,
    help="Seconds that a service has to end before the command kills it.",
)
@local_command
async def up_command(
    session: Session,
    *,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    tls_client_ca: Path | None,
    **given: Any,
) -> None:
    """Start both services on this host.

    When both are healthy, the command prints `ready compiler=HOST:PORT runtime=HOST:PORT`. It runs until SIGTERM or
    Ctrl-C. The services write their logs to HOME/logs. If one service ends, the command stops the other and fails.

    HOME/auth holds the key that signs tokens, and a token for this user's own clients, which find it by themselves. The
    command renews it every day.
    """
    config = StackConfig(tls=_read_tls(tls_cert, tls_key, tls_ca, tls_client_ca), **given)

    def ready(addresses: StackAddresses) -> None:
        session.output.event("ready", {"compiler": addresses.compiler, "runtime": addresses.runtime})
        session.output.text(f"ready compiler={addresses.compiler} runtime={addresses.runtime}\n")

    await run_stack(config, ready)
    session.output.result({"event": "stopped"}, Text("stopped"))


def _read_tls(cert: Path | None, key: Path | None, ca: Path | None, client_ca: Path | None) -> StackTls | None:
    if cert is not None and key is not None and ca is not None:
        return StackTls(cert, key, ca, client_ca)
    if any((cert, key, ca, client_ca)):
        raise click.UsageError("--tls-cert, --tls-key and --tls-ca belong together; --tls-client-ca needs them")
    return None
