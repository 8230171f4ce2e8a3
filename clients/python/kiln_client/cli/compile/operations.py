"""The commands of `kiln operations`."""

from __future__ import annotations

from typing import Final

import click
from google.longrunning.operations_pb2 import Operation
from google.rpc import code_pb2
from kiln.compiler.v1.compiler_pb2 import CompileMetadata, CompileStage, QuantizeWeightsResponse
from rich.text import Text

from kiln_client.cli.compile.compile import show_result
from kiln_client.cli.compile.quantize import show_checkpoint
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import record_from_message
from kiln_client.cli.rows import Row, tabulate
from kiln_client.cli.session import Session, remote_command
from kiln_client.enums import enum_name


def _metadata(operation: Operation) -> CompileMetadata:
    metadata = CompileMetadata()
    operation.metadata.Unpack(metadata)
    return metadata


def _state(operation: Operation) -> str:
    if not operation.done:
        return enum_name(CompileStage.DESCRIPTOR, _metadata(operation).stage)
    if operation.WhichOneof("result") == "error":
        return f"failed: {code_pb2.Code.Name(operation.error.code)}"
    return "done"


_OPERATIONS: Final = (
    Row("operation", "{name}"),
    Row("bundle", lambda operation: _metadata(operation).name),
    Row("state", _state),
)


@click.group("operations")
def operations_group() -> None:
    """List compiles, wait for them and cancel them."""


@operations_group.command("list")
@remote_command
async def list_command(session: Session) -> None:
    """List every compile that the server remembers."""
    async with session.compiler() as compiler:
        found = await compiler.list_operations()
    record = {"operations": [record_from_message(operation) for operation in found]}
    session.output.result(record, tabulate(found, _OPERATIONS, empty="no operations"))


@operations_group.command("wait")
@click.argument("name")
@remote_command
async def wait_command(session: Session, *, name: str) -> None:
    """Wait until an operation ends.

    NAME is operations/…. If the command is interrupted, the operation continues.
    """
    with ProgressView(session.output) as progress:
        async with session.compiler() as compiler:
            response = await compiler.wait_operation(name, on_progress=progress.compiled, on_lost=progress.lost)
    if isinstance(response, QuantizeWeightsResponse):
        show_checkpoint(session, response, name)
    else:
        show_result(session, response, name)


@operations_group.command("cancel")
@click.argument("name")
@remote_command
async def cancel_command(session: Session, *, name: str) -> None:
    """Ask an operation to end.

    NAME is operations/…. `kiln operations list` shows when it has ended.
    """
    async with session.compiler() as compiler:
        await compiler.cancel_operation(name)
    session.output.result({"operation": name, "cancel_requested": True}, Text(f"asked {name} to end"))
