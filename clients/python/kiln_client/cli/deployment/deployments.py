"""The commands that change or show deployments: load, unload, status, load-weights, sessions, reset-kv."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import click
from kiln.runtime.v1 import runtime_pb2
from kiln.runtime.v1.runtime_pb2 import Capabilities, Deployment, GetServerInfoResponse, RoleStatus
from rich.console import Group, RenderableType
from rich.text import Text

from kiln_client.cli.parameters import INT32, SECONDS, IntegerList, enum_choice
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import record_from_message
from kiln_client.cli.rows import SHORT_DIGEST, Row, describe, format_time, pairs, tabulate
from kiln_client.cli.session import Session, remote_command
from kiln_client.runtime import InFlight, KvPolicy, Role

_IN_FLIGHT = enum_choice(runtime_pb2.InFlightPolicy)


def _weights_in_use(deployment: Deployment) -> str:
    weights = ", ".join(
        _name(role.weights_version or role.weights_ref, role.weights_digest[:SHORT_DIGEST])
        if role.weight_epoch
        else "none yet"
        for role in deployment.roles
    )
    return f"{weights}, following {deployment.followed_alias}" if deployment.followed_alias else weights


def _following(deployment: Deployment) -> str:
    version = _name(deployment.followed_version, deployment.followed_digest)
    names = f"{deployment.followed_alias}, which names {version}" if version else deployment.followed_alias
    return ": ".join(filter(None, (names, deployment.follow_message)))


def _executables_in_use(role: RoleStatus) -> str:
    # Their digest is that of the weights unless others have been loaded.
    digest = "" if role.bundle_digest == role.weights_digest else role.bundle_digest
    return _name(role.bundle_version or role.bundle_ref, digest)


def _weights_of(role: RoleStatus) -> str:
    return _name(role.weights_version or role.weights_ref, role.weights_digest)


def _name(ref: str, digest: str) -> str:
    return f"{ref} ({digest})" if digest and ref != digest else ref


def _prompts(deployment: Deployment) -> str:
    capabilities = deployment.capabilities
    return _join_served([("text", capabilities.text), ("chat", capabilities.chat), ("token ids", True)])


def _outputs(deployment: Deployment) -> str:
    capabilities = deployment.capabilities
    return _join_served(
        [
            (f"up to {capabilities.max_num_sequences} sequences of a prompt", capabilities.max_num_sequences > 1),
            (f"logprobs up to {capabilities.max_logprobs}", capabilities.logprobs),
            ("logits", capabilities.logits),
            ("captured inputs", capabilities.input_capture),
        ]
    )


def _host_cores(server: GetServerInfoResponse) -> str:
    first, last = server.host_cores[0], server.host_cores[-1]
    return f"core 0 is {first}" if first == last else f"cores 0 to {last - first} are {first} to {last}"


def _join_served(offers: Iterable[tuple[str, bool]]) -> str:
    return ", ".join(name for name, is_served in offers if is_served) or "tokens only"


_ID: Final = Row("deployment", "{id}")
_STATE: Final = Row("state", "{state}{degraded:, degraded/}")
_SERVER: Final = (
    Row("runtime", "{version}"),
    Row("target", "{target} ({isas})"),
    Row("cores", "{free_cores} of {total_cores} free"),
    Row("on the host", _host_cores, needs="host_cores"),
    Row("memory", "{free_memory_bytes:size} of {total_memory_bytes:size} free"),
)
_BLOCKS: Final = Row("blocks", "{load.used_blocks}/{load.total_blocks}")
_DEPLOYMENTS: Final = (
    _ID,
    _STATE,
    Row("bundle", "{roles.bundle_version|bundle_ref}"),
    Row("weights", _weights_in_use),
    Row("epoch", "{roles.weight_epoch}"),
    Row("cores", "{cores:,}"),
    Row("slots", "{load.used_slots}/{load.total_slots}"),
    _BLOCKS,
    Row("queued", "{load.queued_requests}/{load.queue_capacity}"),
    Row("steps", "{load.steps}"),
)
_TROUBLES: Final = (
    Row("{id}", "{message}", needs="message"),
    # Weights other than those of the alias that it follows.
    Row("{id}", "{followed_alias} is not followed: {follow_message}", needs="degraded"),
)
_NAMES: Final = (_ID, _STATE, Row("message", "{message}", needs="message"))
_ROLE: Final = Row("{role}", "{executables} with weights of {weights}, epoch {weight_epoch}")
_WAITING_ROLE: Final = Row("{role}", "{executables}, waiting for weights: kiln load-weights {deployment} REF")
_SETTINGS: Final = (
    Row("follows", _following, needs="followed_alias"),
    Row("cores", "{cores:,}, {threads_per_core} threads each"),
    Row("chunks", "for {target_inter_token_latency:g} s between two tokens", needs="target_inter_token_latency"),
    Row("memory", "{weights_bytes:size} weights, {kv_bytes:size} KV cache"),
    Row(
        "old weights",
        "{old_weights.version|ref}, epoch {old_weights.weight_epoch}, {old_weights.size_bytes:size}, "
        "{old_weights.active_requests} requests",
        needs="old_weights",
    ),
    Row("lengths", "prompt {capabilities.max_context_length}, sequence {capabilities.max_length} tokens"),
    Row(
        "sampling",
        "temperature {capabilities.default_sampling.temperature:g}, top_k {capabilities.default_sampling.top_k},"
        " top_p {capabilities.default_sampling.top_p:g}, {capabilities.dynamic_sampling:per request/fixed}",
    ),
    Row("prompts", "{prompts}; what is too long is {capabilities.input_truncation:cut/refused}"),
    Row("outputs", _outputs),
    Row(
        "adapters",
        "{load.adapters} loaded, {capabilities.adapter_slots} in the ranks at once",
        needs="capabilities.adapter_slots",
    ),
    Row("adapters", "of the bundle: {capabilities.adapters}", needs="capabilities.adapters"),
)
_KEPT: Final = Row("kept as", "{kind} {format}: {size_bytes:size}")
_SHAPES: Final = Row("{submodel}", "{tokens} tokens, batch {batch_size}{side}")
_LOAD: Final = (
    Row("load", "{load.used_slots}/{load.total_slots} slots, {load.queued_requests} queued, {load.steps} steps"),
    Row(
        "KV cache",
        "{load.used_blocks}/{load.total_blocks} blocks of {load.block_tokens} tokens, {load.used_tokens} tokens held,"
        " {load.queued_tokens} queued",
        needs="load.total_blocks",
    ),
    Row("prefix cache", "prompts share equal beginnings", needs="capabilities.prefix_caching"),
)
_SESSIONS: Final = (
    Row("session", "{id}"),
    Row("held tokens", "{held_tokens}"),
    Row("last use", "{last_use_time:time}"),
    Row("expires", lambda session: "in use" if session.running else format_time(session.expire_time)),
)
_SWAP: Final = (
    Row("deployment", "{deployment.id}"),
    Row("weights", "{deployment.roles.weights_ref}"),
    Row("epoch", "{previous_weight_epoch} → {weight_epoch}"),
    Row("pause", "{pause_duration:ms}"),
    Row("aborted", "{aborted_requests} requests"),
)
_RESET: Final = (
    Row("ended", "{affected_sequences} sequences"),
    Row("freed", "{freed_slots} slots, {freed_blocks} kept blocks"),
    Row("zeroed", "{zeroed_bytes} bytes"),
    Row("epoch", "{weight_epoch}"),
)


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
    session.output.result(record, _deployment_view(deployment))


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
            session.output.result(record_from_message(deployment), _deployment_view(deployment))
            return
        info = await runtime.get_server_info()
        deployments = await runtime.list_deployments()
    record = {
        "server": record_from_message(info),
        "deployments": [record_from_message(deployment) for deployment in deployments],
    }
    session.output.result(record, Group(pairs(describe(info, _SERVER)), *_deployments_view(deployments)))


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
@click.option("--keep-old", is_flag=True, help="Keep the old weights mapped: loading them again reads no file.")
@remote_command
async def load_weights_command(
    session: Session,
    *,
    deployment_id: str,
    ref: str,
    role: Role | None,
    in_flight: InFlight | None,
    kv: KvPolicy | None,
    keep_old: bool,
) -> None:
    """Replace a running deployment's weights.

    The bundle REF must have the deployment's graph ABI and tokenizer. If the command fails, the deployment keeps
    the old weights.
    """
    with ProgressView(session.output) as progress:
        async with session.runtime() as runtime:
            result = await runtime.load_weights(
                deployment_id,
                ref,
                role=role,
                in_flight=in_flight,
                kv=kv,
                keep_old=keep_old,
                on_progress=progress.loaded,
            )
    record = {"event": "result", **record_from_message(result)}
    session.output.result(record, pairs(describe(result, _SWAP)))


@click.command("sessions")
@click.argument("deployment_id", metavar="ID")
@remote_command
async def sessions_command(session: Session, *, deployment_id: str) -> None:
    """List your sessions with a deployment."""
    async with session.runtime() as runtime:
        sessions = await runtime.list_sessions(deployment_id)
    record = {"deployment_id": deployment_id, "sessions": [record_from_message(one) for one in sessions]}
    session.output.result(record, tabulate(sessions, _SESSIONS, empty="no sessions"))


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
    session.output.result(record, pairs([("deployment", deployment_id), *describe(receipt, _RESET)]))


def _deployments_view(deployments: Sequence[Deployment]) -> Iterator[RenderableType]:
    """Shows a table of deployments, and below it what is wrong with which."""
    # In a contiguous cache a slot is a block, which one column says; servers that count no blocks say 0.
    has_blocks = any(one.load.total_blocks not in {0, one.load.total_slots} for one in deployments)
    columns = [column for column in _DEPLOYMENTS if column is not _BLOCKS or has_blocks]
    yield tabulate(deployments, columns, empty="no deployments")
    for one in deployments:
        yield from (Text(f"{name}: {text}") for name, text in describe(one, _TROUBLES))


def _deployment_view(deployment: Deployment) -> RenderableType:
    return pairs(
        [
            *describe(deployment, _NAMES),
            *(line for role in deployment.roles for line in _describe_role(deployment, role)),
            *describe(deployment, _SETTINGS, prompts=_prompts(deployment)),
            *_describe_kept(deployment),
            *_describe_shapes(deployment.capabilities),
            *describe(deployment, _LOAD),
        ]
    )


def _describe_role(deployment: Deployment, role: RoleStatus) -> Iterator[tuple[str, str]]:
    row = _ROLE if role.weight_epoch else _WAITING_ROLE
    texts = {"executables": _executables_in_use(role), "weights": _weights_of(role), "deployment": deployment.id}
    return describe(role, [row], **texts)


def _describe_kept(deployment: Deployment) -> Iterator[tuple[str, str]]:
    for kind, kept in (("weights", deployment.kept_weights), ("KV cache", deployment.kept_kv)):
        for one in kept:
            yield from describe(one, [_KEPT], kind=kind)


def _describe_shapes(capabilities: Capabilities) -> Iterator[tuple[str, str]]:
    for shapes in capabilities.submodels:
        side = f", {capabilities.padding_side} padded" if shapes.submodel == "context_encoding" else ""
        yield from describe(shapes, [_SHAPES], side=side)
