"""The commands that make bundles, and the checkpoint that `--model` names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import click
from kiln.compiler.v1.compiler_pb2 import CompileResponse, Target
from rich.console import Group

from kiln_client.cli.parameters import DOCUMENT, OVERRIDE, QUANTIZE, enum_choice, read_configuration
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import record_from_message
from kiln_client.cli.rows import Row, describe, pairs, tabulate
from kiln_client.cli.session import Session, remote_command
from kiln_client.compile_requests import compile_request
from kiln_client.compiler import AsyncCompiler
from kiln_client.errors import NotFound

T = TypeVar("T")

MODEL = click.option(
    "--model",
    required=True,
    metavar="NAME|DIR",
    help="Hugging Face checkpoint: a name below a model root of the compiler, else a directory of this host that the "
    "compiler may read. What begins with . or / is a directory of this host.",
)
_EXECUTABLES: Final = (
    Row("executable", "{tag}"),
    Row("cache", "{cache}"),
    Row("time", "{duration:.1f} s", needs="duration"),
    Row("size", "{size_bytes:size}"),
)
_BUNDLE: Final = (
    Row("version", "{name}:v{version}"),
    Row("bundle", "{digest}"),
    Row("cache", "{cache}"),
    Row("time", "{duration:.1f} s"),
)

#: Reasons why a compiler does not take a name.
_NOT_THERE: Final = ("CHECKPOINT_NOT_FOUND", "ADAPTER_NOT_FOUND")

_NAME = click.option("--name", required=True, help="Name of the bundle.")
_SKIP_CACHE_LOOKUP = click.option("--skip-cache-lookup", is_flag=True, help="Build even if the cache has the result.")


@click.command("compile")
@click.argument("config", type=DOCUMENT)
@MODEL
@_NAME
@click.option(
    "-O", "--optimization-level", type=click.Choice(["0", "1", "2"]), help="Level 0 needs no C++ toolchain. Default: 1."
)
@click.option("--target", type=enum_choice(Target.Kind), help="Hardware to compile for. Default: cpu.")
@click.option(
    "--isa",
    help="CPU instruction set: x86-64-v3, -v4, -v4-vnni, -v4-bf16, -v4-amx, native. Default: the compiler's.",
)
@_SKIP_CACHE_LOOKUP
@click.option("--salt", help="Text that enters every cache key.")
@click.option("--debug", is_flag=True, help="Keep every graph, with its source lines, beside the bundle.")
@QUANTIZE
@OVERRIDE
@remote_command
async def compile_command(
    session: Session,
    *,
    config: BinaryIO,
    model: str,
    name: str,
    optimization_level: str | None,
    overrides: tuple[str, ...],
    quantize: str | None,
    **options: Any,
) -> None:
    """Compile a checkpoint into a bundle.

    CONFIG is a YAML or JSON file, or `-` for standard input. It uses NxD Inference's names:

        neuron_config: {seq_len: 256, batch_size: 2}

    NxD Inference's own neuron_config.json is such a file. --override replaces a value in it, by path; several
    apply in order.

    After a compile with --debug, `kiln bundles read NAME graphs.jsonl.gz` reads the graphs.

    A restart of the compiler interrupts neither the compile nor the command. Interrupting the command cancels the
    compile.
    """
    document = read_configuration(config, overrides, quantize)
    given = {option: value for option, value in options.items() if value is not None}
    if optimization_level is not None:
        given["optimization_level"] = int(optimization_level)
    await _build(
        session,
        model,
        lambda compiler, path, told: compiler.compile(compile_request(name, path, document, **given), **told),
    )


@click.command("shard-weights")
@click.argument("executables_ref", metavar="REF")
@MODEL
@_NAME
@_SKIP_CACHE_LOOKUP
@remote_command
async def shard_weights_command(
    session: Session, *, executables_ref: str, model: str, name: str, skip_cache_lookup: bool
) -> None:
    """Write a checkpoint's weights as a bundle.

    The weights fit the executables of the bundle REF: the checkpoint is another one of the same model, such as a
    fine-tune. The result has weights only, for `kiln load-weights`. Interrupting the command cancels the operation.
    """
    await _build(
        session,
        model,
        lambda compiler, path, told: compiler.shard_weights(
            name, path, executables_ref, skip_cache_lookup=skip_cache_lookup, **told
        ),
    )


@click.command("shard")
@click.argument("adapter", metavar="NAME|PATH")
@click.option("--executables", "executables_ref", required=True, metavar="REF", help="Bundle that has the executables.")
@_NAME
@remote_command
async def shard_adapter_command(session: Session, *, adapter: str, executables_ref: str, name: str) -> None:
    """Write an adapter as a bundle, in seconds.

    NAME|PATH is a directory as PEFT saves it, or a file of NxD's training: below a model root of the compiler, else of
    this host. The executables must have room for adapters: their bundle was compiled with `lora_config`. The result is
    for `kiln adapters load`. Interrupting the command cancels the operation.
    """
    await _build(
        session, adapter, lambda compiler, path, told: compiler.shard_adapter(name, path, executables_ref, **told)
    )


async def _build(
    session: Session, path: str, call: Callable[[AsyncCompiler, str, dict[str, Any]], Awaitable[CompileResponse]]
) -> None:
    """Makes a bundle of what is at a path, and shows progress and result. `call` passes on what it is given last."""
    started = Started(session)
    with ProgressView(session.output) as progress:
        told = {"on_start": started, "on_progress": progress.compiled, "on_lost": progress.lost}
        async with session.compiler() as compiler:
            response = await call_with_path(path, lambda found: call(compiler, found, told))
    show_result(session, response, started.operation)


class Started:
    """Tells of the operation that a command has started, and remembers its name."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.operation = ""

    def __call__(self, operation: str) -> None:
        """Is called with the name."""
        self.operation = operation
        self._session.output.event("started", {"operation": operation})


def show_result(session: Session, response: CompileResponse, operation: str) -> None:
    """Shows the result of an operation."""
    record = record_from_message(response)
    record |= {
        "bundle": record.pop("digest"),
        "version": f"{response.name}:v{response.version}",
        "operation": operation,
    }
    executables = [tabulate(response.executables, _EXECUTABLES)] if response.executables else []
    warnings = (("warning", warning) for warning in response.warnings)
    view = Group(*executables, pairs([*describe(response, _BUNDLE), *warnings]))
    session.output.result({"event": "result", **record}, view)


async def call_with_path(model: str, call: Callable[[str], Awaitable[T]]) -> T:
    """Calls the compiler with the checkpoint or adapter that a command names, and returns what `call` returns.

    A name below a model root means the same in every current directory. A path of this host is tried only if the
    compiler knows no such name: `call` is then called a second time.
    """
    if model.startswith((".", "/")):
        return await call(_absolute(model))
    try:
        return await call(model)
    except NotFound as error:
        is_refused = error.reason in _NOT_THERE and "operation" not in error.metadata
        if not is_refused or not Path(_absolute(model)).exists():  # noqa: ASYNC240 - one look, as short as a call
            raise
    return await call(_absolute(model))


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
