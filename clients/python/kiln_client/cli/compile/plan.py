"""The command `kiln plan`."""

from __future__ import annotations

import json
from typing import Any, BinaryIO, Final

import click
from kiln.compiler.v1.compiler_pb2 import PlanCompileResponse, Target

from kiln_client.cli.compile.compile import MODEL, call_with_path
from kiln_client.cli.compile.plan_view import plan_view
from kiln_client.cli.parameters import BYTE_SIZE, DOCUMENT, OVERRIDE, QUANTIZE, enum_choice, read_configuration
from kiln_client.cli.records import Record, record_from_message
from kiln_client.cli.session import Session, remote_command
from kiln_client.compile_requests import plan_request

DOES_NOT_FIT: Final = 3
"""Exit code of a plan that does not fit, or whose graphs Neuron's compiler would refuse."""


@click.command("plan")
@click.argument("config", type=DOCUMENT)
@MODEL
@click.option("--target", type=enum_choice(Target.Kind), help="Hardware to plan for. Default: cpu.")
@click.option("--core-memory", type=BYTE_SIZE, help="Memory of one core, such as 16GiB. Default: the target's.")
@click.option(
    "-O", "--optimization-level", type=click.Choice(["0", "1", "2"]), help="As for `kiln compile`. Default: 1."
)
@click.option("--isa", help="CPU instruction set, as for `kiln compile`.")
@click.option(
    "--check-graphs",
    is_flag=True,
    default=None,
    help="Trace each graph and check it for what Neuron's compiler would refuse. Takes seconds for each.",
)
@click.option("--salt", help="Text that enters every cache key, as for `kiln compile`.")
@QUANTIZE
@OVERRIDE
@remote_command
async def plan_command(
    session: Session,
    *,
    config: BinaryIO,
    model: str,
    target: str | None,
    core_memory: int | None,
    optimization_level: str | None,
    overrides: tuple[str, ...],
    quantize: str | None,
    **options: Any,
) -> None:
    """Show what a compile would make, and whether it fits.

    CONFIG is a YAML or JSON file, as for `kiln compile`. The compiler compiles nothing and reads only the headers of
    weights. If the plan does not fit, or if --check-graphs finds something, the exit code is 3.
    """
    document = read_configuration(config, overrides, quantize)
    given = {option: value for option, value in options.items() if value is not None}
    if core_memory is not None:
        given["core_memory_bytes"] = core_memory
    if optimization_level is not None:
        given["optimization_level"] = int(optimization_level)
    if target is not None:
        given["target"] = target
    async with session.compiler() as compiler:
        plan = await call_with_path(model, lambda path: compiler.plan_compile(plan_request(path, document, **given)))
    session.output.result(plan_record(plan), plan_view(plan, target or "cpu"))
    if not plan.fits or plan.graph_check.num_findings:
        raise click.exceptions.Exit(DOES_NOT_FIT)


def plan_record(plan: PlanCompileResponse) -> Record:
    """Converts a plan to a JSON object. A bucket is the list of its lengths."""
    record = record_from_message(plan)
    record["config"] = json.loads(record.pop("resolved_config_json") or "null")
    for submodel in record["submodels"]:
        submodel["buckets"] = [bucket["tokens"] for bucket in submodel["buckets"]]
    for executable in record["executables"]:
        executable["bucket"] = executable["bucket"]["tokens"]
    for finding in (record.get("graph_check") or {}).get("findings", ()):
        finding["bucket"] = finding["bucket"]["tokens"]
    return record
