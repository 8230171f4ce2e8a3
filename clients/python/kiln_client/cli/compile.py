"""`kiln compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import click
from kiln.compiler.v1.compiler_pb2 import CompileResponse, Target

from kiln_client.cli.parameters import DOCUMENT, enum_choice, read_document
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import Record, record_from_message
from kiln_client.cli.session import Session, remote_command
from kiln_client.cli.views import compile_view
from kiln_client.compiler import compile_request
from kiln_client.errors import DocumentInvalid


@click.command("compile")
@click.argument("config", type=DOCUMENT)
@click.option("--model", required=True, metavar="DIR", help="Hugging Face checkpoint, here or under a model root.")
@click.option("--name", required=True, help="Name of the bundle.")
@click.option(
    "-O", "--optimization-level", type=click.Choice(["0", "1", "2"]), help="0 needs no C++ toolchain. Default: 1."
)
@click.option("--target", type=enum_choice(Target.Kind), help="Hardware to compile for. Default: cpu.")
@click.option("--isa", help="CPU instruction set: x86-64-v3 (default), x86-64-v4 or native.")
@click.option("--skip-cache-lookup", is_flag=True, help="Build even where the cache has the result.")
@click.option("--salt", help="Text that enters every cache key.")
@remote_command
async def compile_command(
    session: Session,
    *,
    config: BinaryIO,
    model: str,
    name: str,
    optimization_level: str | None,
    **options: Any,
) -> None:
    """Compile a checkpoint into a bundle.

    CONFIG is a YAML or JSON file, `-` for standard input, with NxD Inference's names:

        neuron_config: {seq_len: 256, batch_size: 2}

    Interrupting the command cancels the compile.
    """
    document = read_document(config, reason="CONFIG_INVALID", field="config")
    if not isinstance(document, dict):
        raise DocumentInvalid(config.name, "it holds a list", reason="CONFIG_INVALID", field="config")
    given = {option: value for option, value in options.items() if value is not None}
    if optimization_level is not None:
        given["optimization_level"] = int(optimization_level)
    request = compile_request(name, _checkpoint(model), document, **given)
    operation: Record = {}

    def started(operation_name: str) -> None:
        operation["operation"] = operation_name
        session.output.event("started", operation)

    with ProgressView(session.output) as progress:
        async with session.compiler() as compiler:
            response = await compiler.compile(request, on_start=started, on_progress=progress.compiled)
    version = f"{response.name}:v{response.version}"
    record = {"event": "result", **_result_record(response, version), **operation}
    session.output.result(record, compile_view(response, version))


def _checkpoint(model: str) -> str:
    """Gives an absolute path for a directory that is here; a path under one of the server's model roots as it is."""
    path = Path(model)
    return str(path.absolute()) if path.exists() else model


def _result_record(response: CompileResponse, version: str) -> Record:
    record = record_from_message(response)
    return record | {"bundle": record.pop("digest"), "version": version}
