"""The command `kiln quantize`."""

from __future__ import annotations

from typing import Final

import click
from kiln.compiler.v1.compiler_pb2 import QuantizeWeightsResponse

from kiln_client.cli.compile.compile import Started, call_with_path
from kiln_client.cli.parameters import QUANTIZED_DTYPES
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import record_from_message
from kiln_client.cli.rows import Row, describe, pairs
from kiln_client.cli.session import Session, remote_command

_CHECKPOINT: Final = (
    Row("checkpoint", "{model}"),
    Row("size", "{size_bytes:size}"),
    Row("time", "{duration:.1f} s"),
)


@click.command("quantize")
@click.argument("model")
@click.option("--output", required=True, metavar="DIR", help="Directory to make, below a model root of the compiler.")
@click.option(
    "--dtype",
    type=click.Choice(QUANTIZED_DTYPES),
    help="With a scale for each output; int4: with two numbers for each group of 128 inputs. Default: int8.",
)
@click.option(
    "--layout",
    type=click.Choice(["compressed-tensors", "nxd"]),
    help="compressed-tensors, which vLLM loads, or nxd, as NxD Inference saves weights. Default: compressed-tensors.",
)
@click.option(
    "--keep",
    "kept",
    multiple=True,
    metavar="PART",
    help="Linear layers with this part in their names stay as they are; may be repeated.",
)
@remote_command
async def quantize_command(
    session: Session, *, model: str, output: str, dtype: str | None, layout: str | None, kept: tuple[str, ...]
) -> None:
    """Write a quantized checkpoint of a plain one.

    MODEL is a Hugging Face checkpoint, as in `kiln compile`. The new one can be compiled, run, and loaded by others. A
    restart of the compiler interrupts neither the operation nor the command. Interrupting the command cancels the
    operation.
    """
    started = Started(session)
    with ProgressView(session.output) as progress:
        async with session.compiler() as compiler:
            response = await call_with_path(
                model,
                lambda path: compiler.quantize_weights(
                    path,
                    output,
                    dtype=dtype or "",
                    layout=layout or "",
                    modules_to_not_convert=kept,
                    on_start=started,
                    on_progress=progress.compiled,
                    on_lost=progress.lost,
                ),
            )
    show_checkpoint(session, response, started.operation)


def show_checkpoint(session: Session, response: QuantizeWeightsResponse, operation: str) -> None:
    """Shows the result of an operation."""
    record = record_from_message(response) | {"operation": operation}
    warnings = (("warning", warning) for warning in response.warnings)
    session.output.result({"event": "result", **record}, pairs([*describe(response, _CHECKPOINT), *warnings]))
