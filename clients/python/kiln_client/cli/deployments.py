"""The commands that change or show deployments: load, unload, status, load-weights, sessions, reset-kv."""

from __future__ import annotations

import click
from kiln.runtime.v1 import runtime_pb2
from rich.console import Group
from rich.text import Text

from kiln_client.cli.parameters import INT32, SECONDS, IntegerList, enum_choice
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import record_from_message
from kiln_client.cli.session import Session, remote_command
from kiln_client.cli.views import deployment_view, deployments_view, pairs, server_view, sessions_view, weights_view
from kiln_client.runtime import InFlight, KvPolicy, Role

_IN_FLIGHT = enum_choice(runtime_pb2.InFlightPolicy)


@click.command("load")
@click.argument("ref")
@click.option("--deployment", "deployment_id", required=True, metavar="ID", help="Id of the new deployment.")
@click.option("--cores", type=IntegerList(), help="Cores to use. Default: the runtime chooses.")
@click.option(
    "--threads-per-core", type=INT32, help="Threads that each rank computes with. Default: the runtime's own."
)
@click.option(
    "--follow-alias",
    is_flag=True,
    help="Follow the alias of REF, NAME@ALIAS: whenever it moves, the runtime loads the weights that it names.",
)
@click.option(
    "--target-inter-token-latency",
    "target_s",
    type=SECONDS,
    help="Seconds between two tokens of a sequence, a chunk of another one's prompt included, that the runtime chooses "
    "chunks for. Default: the runtime's own.",
)
@remote_command
async def load_command(
    session: Session,
    *,
    ref: str,
    deployment_id: str,
    cores: tuple[int, ...] | None,
    threads_per_core: int | None,
    follow_alias: bool,
    target_s: float | None,
) -> None:
    """Load a bundle and wait until it serves.

    REF is NAME, NAME:vN, NAME@ALIAS or sha256:HEX. If the bundle has no weights, the command waits until the deployment
    awaits them. If the command is interrupted, the runtime continues to load; `kiln status` shows the deployment.
    """
    with ProgressView(session.output) as progress:
        async with session.runtime() as runtime:
            deployment = await runtime.load_bundle(
                ref,
                deployment_id,
                cores=cores or (),
                threads_per_core=threads_per_core,
                follow_alias=follow_alias,
                target_inter_token_latency_s=target_s,
                on_progress=progress.loaded,
            )
    record = {"event": "result", **record_from_message(deployment)}
    session.output.result(record, deployment_view(deployment))


@click.command("unload")
@click.argument("deployment_id", metavar="ID")
@click.option("--in-flight", type=_IN_FLIGHT, help="What the runtime does about running requests. Default: abort.")
@remote_command
async def unload_command(session: Session, *, deployment_id: str, in_flight: InFlight | None) -> None:
    """End a deployment and free its cores."""
    async with session.runtime() as runtime:
        response = await runtime.unload_bundle(deployment_id, in_flight=in_flight)
    record = {"deployment_id": deployment_id, **record_from_message(response)}
    view = Text(f"unloaded {deployment_id}, {response.aborted_requests} requests aborted")
    session.output.result(record, view)


@click.command("status")
@click.argument("deployment_id", metavar="[ID]", required=False)
@remote_command
async def status_command(session: Session, *, deployment_id: str | None) -> None:
    """Show the runtime and its deployments, or one of them."""
    async with session.runtime() as runtime:
        if deployment_id is not None:
            deployment = await runtime.get_deployment(deployment_id)
            session.output.result(record_from_message(deployment), deployment_view(deployment))
            return
        info = await runtime.get_server_info()
        deployments = await runtime.list_deployments()
    record = {
        "server": record_from_message(info),
        "deployments": [record_from_message(deployment) for deployment in deployments],
    }
    session.output.result(record, Group(server_view(info), deployments_view(deployments)))


@click.command("load-weights")
@click.argument("deployment_id", metavar="ID")
@click.argument("ref")
@click.option("--role", type=enum_choice(runtime_pb2.Role), help="Role whose weights change. Default: target.")
@click.option("--in-flight", type=_IN_FLIGHT, help="What the runtime does about running requests. Default: wait.")
@click.option(
    "--kv",
    type=enum_choice(runtime_pb2.KvPolicy),
    help="What the runtime does with the KV cache. Default: invalidate.",
)
@remote_command
async def load_weights_command(
    session: Session,
    *,
    deployment_id: str,
    ref: str,
    role: Role | None,
    in_flight: InFlight | None,
    kv: KvPolicy | None,
) -> None:
    """Replace a running deployment's weights.

    The bundle REF must have the deployment's graph ABI and tokenizer. If the command fails, the deployment keeps
    the old weights.
    """
    with ProgressView(session.output) as progress:
        async with session.runtime() as runtime:
            result = await runtime.load_weights(
                deployment_id, ref, role=role, in_flight=in_flight, kv=kv, on_progress=progress.loaded
            )
    record = {"event": "result", **record_from_message(result)}
    session.output.result(record, weights_view(result))


@click.command("sessions")
@click.argument("deployment_id", metavar="ID")
@remote_command
async def sessions_command(session: Session, *, deployment_id: str) -> None:
    """List your sessions with a deployment."""
    async with session.runtime() as runtime:
        sessions = await runtime.list_sessions(deployment_id)
    record = {"deployment_id": deployment_id, "sessions": [record_from_message(one) for one in sessions]}
    session.output.result(record, sessions_view(sessions))


@click.command("reset-kv")
@click.argument("deployment_id", metavar="ID")
@click.option("--in-flight", type=_IN_FLIGHT, help="What the runtime does about running requests. Default: wait.")
@click.option(
    "--prefix-cache",
    is_flag=True,
    help="Forget only what later requests could share of earlier ones. Running requests go on; not with --in-flight.",
)
@click.option(
    "--session",
    "session_id",
    help="Forget only this session of yours. Running requests go on; not with --in-flight or --prefix-cache.",
)
@remote_command
async def reset_kv_command(
    session: Session, *, deployment_id: str, in_flight: InFlight | None, prefix_cache: bool, session_id: str | None
) -> None:
    """Make a deployment forget its KV cache.

    Shows how many sequences ended, and how much of the cache was freed and zeroed.
    """
    if prefix_cache and session_id is not None:
        raise click.UsageError("--prefix-cache and --session exclude each other")
    async with session.runtime() as runtime:
        receipt = await runtime.reset_kv_cache(
            deployment_id, in_flight=in_flight, prefix_cache=prefix_cache, session_id=session_id
        )
    record = {"deployment_id": deployment_id, **record_from_message(receipt)}
    view = pairs(
        (
            ("deployment", deployment_id),
            ("ended", f"{receipt.affected_sequences} sequences"),
            ("freed", f"{receipt.freed_slots} slots, {receipt.freed_blocks} kept blocks"),
            ("zeroed", f"{receipt.zeroed_bytes} bytes"),
            ("epoch", receipt.weight_epoch),
        )
    )
    session.output.result(record, view)
