"""The `kiln` command: its subcommands, and the exit codes for their errors."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

import click
import google.protobuf
import grpc
from rich.text import Text

from kiln_client.cli.bundle.bundles import bundles_group
from kiln_client.cli.bundle.config import config_group
from kiln_client.cli.compile.compile import compile_command, shard_adapter_command, shard_weights_command
from kiln_client.cli.compile.operations import operations_group
from kiln_client.cli.compile.plan import plan_command
from kiln_client.cli.compile.quantize import quantize_command
from kiln_client.cli.deployment.adapters import adapters_group
from kiln_client.cli.deployment.deployments import (
    load_command,
    load_weights_command,
    reset_kv_command,
    sessions_command,
    status_command,
    unload_command,
)
from kiln_client.cli.deployment.generate import embed_command, generate_command, tokenize_command
from kiln_client.cli.doctor import doctor_command
from kiln_client.cli.errors import errors_command
from kiln_client.cli.local.pull import pull_command
from kiln_client.cli.local.run import run_command
from kiln_client.cli.local.serve import serve_command
from kiln_client.cli.local.services import down_command, logs_command, ps_command
from kiln_client.cli.local.token import token_command
from kiln_client.cli.local.up import up_command
from kiln_client.cli.output import Output
from kiln_client.cli.session import Session, Terminated, local_command, shared_options
from kiln_client.errors import Cancelled, FailedPrecondition, FieldViolation, Internal, InvalidArgument, KilnError
from kiln_client.version import __version__

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit codes: the command failed; the command line is wrong; Ctrl-C, or SIGTERM, ended the command."""


def _show_version(output: Output) -> None:
    versions = {
        "version": __version__,
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "protobuf": google.protobuf.__version__,
    }
    output.result(versions, Text(f"kiln {__version__}"))


def _take_version(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        _show_version(context.obj)
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@shared_options
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_take_version,
    help="As the command `version`.",
)
def kiln() -> None:
    """Compile models into bundles, load them, and stream tokens from them.

    \b
    kiln run ./checkpoint                                 chat, in one command

    \b
    kiln up --home .kiln                                  start both services
    kiln compile config.yaml --model DIR --name tiny      make a bundle
    kiln load tiny --deployment demo                      load it
    kiln generate --deployment demo --prompt "Once"       use it
    """


@click.command("version")
@local_command
async def version_command(session: Session) -> None:
    """Show the version of this client."""
    _show_version(session.output)


for _command in (
    run_command,
    serve_command,
    pull_command,
    ps_command,
    logs_command,
    down_command,
    up_command,
    doctor_command,
    token_command,
    compile_command,
    plan_command,
    shard_weights_command,
    quantize_command,
    bundles_group,
    config_group,
    load_command,
    unload_command,
    status_command,
    generate_command,
    load_weights_command,
    adapters_group,
    sessions_command,
    reset_kv_command,
    embed_command,
    tokenize_command,
    operations_group,
    errors_command,
    version_command,
):
    kiln.add_command(_command)
adapters_group.add_command(shard_adapter_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Errors of the command line itself occur before its options are known.
    output = Output(as_json="--json" in words)
    try:
        _require_text(words)
        code = kiln.main(words, prog_name="kiln", standalone_mode=False, obj=output)
    except click.ClickException as error:
        return _report_usage(output, error)
    except click.Abort:
        output.error(Cancelled("the command was interrupted", reason="INTERRUPTED"))
        return INTERRUPTED
    except KilnError as error:
        output.error(error)
        return TERMINATED if isinstance(error, Terminated) else FAILED
    except OSError as error:
        # Without a name, it is one of the standard streams.
        subject = error.filename or "standard output"
        output.error(FailedPrecondition(f"{subject}: {error.strerror or error}", reason="FILE_UNUSABLE"))
        return FAILED
    except Exception as error:
        if output.as_json:
            output.error(Internal(f"kiln itself failed: {error!r}", reason="CLIENT_FAILED"))
        raise
    return code if isinstance(code, int) else 0


def _require_text(words: Sequence[str]) -> None:
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"got {word!a}; accepted: text in UTF-8") from None


def _report_usage(output: Output, error: click.ClickException) -> int:
    if not output.as_json:
        error.show()
        return USAGE
    message = error.format_message()
    parameter = getattr(error, "param", None)
    fields = (FieldViolation(parameter.opts[0], message, "USAGE_INVALID"),) if parameter is not None else ()
    output.error(InvalidArgument(message, reason="USAGE_INVALID", fields=fields))
    return USAGE
