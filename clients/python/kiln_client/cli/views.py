"""Views of results for people: tables of names and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kiln.compiler.v1.compiler_pb2 import CacheResult, CompileResponse
from kiln.runtime.v1.generation_pb2 import Usage
from kiln.runtime.v1.runtime_pb2 import (
    Capabilities,
    Deployment,
    GetServerInfoResponse,
    Load,
    LoadWeightsResult,
    Role,
    RoleStatus,
    Session,
)
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kiln_client.enums import enum_name

#: Characters of a digest that tables show.
SHORT_DIGEST = len("sha256:") + 12


def pairs(values: Iterable[tuple[str, object]]) -> Table:
    """Makes a table of names and values, one pair per line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in values:
        grid.add_row(Text(name), Text(str(value)))
    return grid


def rows(header: Sequence[str], lines: Iterable[Sequence[object]]) -> Table:
    """Makes a table of records under a header."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in header:
        table.add_column(title, overflow="fold")
    for line in lines:
        table.add_row(*(Text(str(value)) for value in line))
    return table


def compile_view(response: CompileResponse, version: str) -> RenderableType:
    """Shows the result of a compile."""
    executables = rows(
        ("executable", "cache", "time", "size"),
        (
            (
                result.tag,
                enum_name(CacheResult.DESCRIPTOR, result.cache),
                f"{result.duration.ToTimedelta().total_seconds():.1f} s" if result.HasField("duration") else "",
                decimal(result.size_bytes),
            )
            for result in response.executables
        ),
    )
    summary = pairs(
        (
            ("version", version),
            ("bundle", response.digest),
            ("cache", enum_name(CacheResult.DESCRIPTOR, response.cache)),
            ("time", f"{response.duration.ToTimedelta().total_seconds():.1f} s"),
            *(("warning", warning) for warning in response.warnings),
        )
    )
    return Group(executables, summary) if response.executables else summary


def server_view(info: GetServerInfoResponse) -> RenderableType:
    """Shows version, target, cores and memory of a runtime."""
    return pairs(
        (
            ("runtime", info.version),
            ("target", f"{info.target} ({', '.join(info.isas)})"),
            ("cores", f"{info.free_cores} of {info.total_cores} free"),
            ("memory", f"{decimal(info.free_memory_bytes)} of {decimal(info.total_memory_bytes)} free"),
        )
    )


def deployments_view(deployments: Sequence[Deployment]) -> RenderableType:
    """Shows a table of deployments, with version and digest of what serves, and below it what is wrong with which."""
    if not deployments:
        return Text("no deployments", style="dim")
    # In a contiguous cache a slot is a block, which one column says; servers that count no blocks say 0.
    has_blocks = any(one.load.total_blocks not in {0, one.load.total_slots} for one in deployments)
    blocks = ("blocks",) if has_blocks else ()
    table = rows(
        ("deployment", "state", "bundle", "weights", "epoch", "cores", "slots", *blocks, "queued", "steps"),
        (
            (
                deployment.id,
                _state(deployment),
                ", ".join(role.bundle_version or role.bundle_ref for role in deployment.roles),
                _weights_in_use(deployment),
                ", ".join(str(role.weight_epoch) for role in deployment.roles),
                ",".join(map(str, deployment.cores)),
                f"{deployment.load.used_slots}/{deployment.load.total_slots}",
                *(f"{deployment.load.used_blocks}/{deployment.load.total_blocks}" for _ in blocks),
                f"{deployment.load.queued_requests}/{deployment.load.queue_capacity}",
                deployment.load.steps,
            )
            for deployment in deployments
        ),
    )
    troubles = ((one.id, text) for one in deployments for text in (one.message, _lag(one)) if text)
    return Group(table, *(Text(f"{name}: {text}") for name, text in troubles))


def sessions_view(sessions: Sequence[Session]) -> RenderableType:
    """Shows a table of sessions."""
    if not sessions:
        return Text("no sessions", style="dim")
    return rows(
        ("session", "held tokens", "last use", "expires"),
        (
            (
                session.id,
                session.held_tokens,
                f"{session.last_use_time.ToDatetime():%Y-%m-%d %H:%M:%S}",
                "in use" if session.running else f"{session.expire_time.ToDatetime():%Y-%m-%d %H:%M:%S}",
            )
            for session in sessions
        ),
    )


def deployment_view(deployment: Deployment) -> RenderableType:
    """Shows one deployment in full."""
    capabilities, load = deployment.capabilities, deployment.load
    sampling = capabilities.default_sampling
    freedom = "per request" if capabilities.dynamic_sampling else "fixed"
    roles = (
        (
            enum_name(Role.DESCRIPTOR, role.role),
            f"{bundle} with weights of {_name(role.weights_version or role.weights_ref, role.weights_digest)},"
            f" epoch {role.weight_epoch}"
            if role.weight_epoch
            else f"{bundle}, waiting for weights: kiln load-weights {deployment.id} REF",
        )
        for role in deployment.roles
        for bundle in [_executables_in_use(role)]
    )
    return pairs(
        (
            ("deployment", deployment.id),
            ("state", _state(deployment)),
            *((("message", deployment.message),) if deployment.message else ()),
            *roles,
            *_following(deployment),
            ("cores", f"{','.join(map(str, deployment.cores))}, {deployment.threads_per_core} threads each"),
            *_target(deployment),
            ("memory", f"{decimal(deployment.weights_bytes)} weights, {decimal(deployment.kv_bytes)} KV cache"),
            ("lengths", f"prompt {capabilities.max_context_length}, sequence {capabilities.max_length} tokens"),
            (
                "sampling",
                f"temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p {sampling.top_p:g}, {freedom}",
            ),
            *_accepted_requests(capabilities),
            ("load", f"{load.used_slots}/{load.total_slots} slots, {load.queued_requests} queued, {load.steps} steps"),
            *_kv_cache(load),
            *((("prefix cache", "prompts share equal beginnings"),) if capabilities.prefix_caching else ()),
        )
    )


def _target(deployment: Deployment) -> Iterable[tuple[str, str]]:
    """Yields the time between tokens that chunks are chosen for, if there is one."""
    if deployment.HasField("target_inter_token_latency"):
        target_s = deployment.target_inter_token_latency.ToNanoseconds() / 1e9
        yield "chunks", f"for {target_s:g} s between two tokens"


def _kv_cache(load: Load) -> Iterable[tuple[str, str]]:
    """Yields how full the KV cache is, if the server counts its blocks."""
    if load.total_blocks:
        blocks = f"{load.used_blocks}/{load.total_blocks} blocks of {load.block_tokens} tokens"
        yield "KV cache", f"{blocks}, {load.used_tokens} tokens held, {load.queued_tokens} queued"


def _accepted_requests(capabilities: Capabilities) -> Iterable[tuple[str, str]]:
    """Yields the options that requests may use, and the shapes in which they run."""
    prompts = (("text", capabilities.text), ("chat", capabilities.chat), ("token ids", True))
    surplus = "cut" if capabilities.input_truncation else "refused"
    yield "prompts", f"{_join_served(prompts)}; what is too long is {surplus}"
    outputs = (
        (f"up to {capabilities.max_num_sequences} sequences of a prompt", capabilities.max_num_sequences > 1),
        (f"logprobs up to {capabilities.max_logprobs}", capabilities.logprobs),
        ("logits", capabilities.logits),
        ("captured inputs", capabilities.input_capture),
    )
    yield "outputs", _join_served(outputs)
    for shapes in capabilities.submodels:
        side = f", {capabilities.padding_side} padded" if shapes.submodel == "context_encoding" else ""
        buckets = ", ".join(map(str, shapes.tokens))
        yield shapes.submodel, f"{buckets} tokens, batch {shapes.batch_size}{side}"


def _join_served(offers: Iterable[tuple[str, bool]]) -> str:
    return ", ".join(name for name, is_served in offers if is_served) or "tokens only"


def _weights_in_use(deployment: Deployment) -> str:
    weights = ", ".join(
        _name(role.weights_version or role.weights_ref, role.weights_digest[:SHORT_DIGEST])
        if role.weight_epoch
        else "none yet"
        for role in deployment.roles
    )
    return f"{weights}, following {deployment.followed_alias}" if deployment.followed_alias else weights


def _executables_in_use(role: RoleStatus) -> str:
    # Their digest is that of the weights unless others have been loaded.
    digest = "" if role.bundle_digest == role.weights_digest else role.bundle_digest
    return _name(role.bundle_version or role.bundle_ref, digest)


def _state(deployment: Deployment) -> str:
    state = enum_name(Deployment.State.DESCRIPTOR, deployment.state)
    return f"{state}, degraded" if deployment.degraded else state


def _name(ref: str, digest: str) -> str:
    return f"{ref} ({digest})" if digest and ref != digest else ref


def _lag(deployment: Deployment) -> str:
    """Says why a deployment serves other weights than those of the alias that it follows; empty if it does not."""
    return f"{deployment.followed_alias} is not followed: {deployment.follow_message}" if deployment.degraded else ""


def _following(deployment: Deployment) -> Iterable[tuple[str, str]]:
    if deployment.followed_alias:
        version = _name(deployment.followed_version, deployment.followed_digest)
        names = f"{deployment.followed_alias}, which names {version}" if version else deployment.followed_alias
        yield "follows", ": ".join(filter(None, (names, deployment.follow_message)))


def weights_view(result: LoadWeightsResult) -> RenderableType:
    """Shows the outcome of a weight load."""
    return pairs(
        (
            ("deployment", result.deployment.id),
            ("weights", ", ".join(role.weights_ref for role in result.deployment.roles)),
            ("epoch", f"{result.previous_weight_epoch} → {result.weight_epoch}"),
            ("pause", f"{result.pause_duration.ToTimedelta().total_seconds() * 1e3:.1f} ms"),
            ("aborted", f"{result.aborted_requests} requests"),
        )
    )


def usage_line(usage: Usage, *, finish: str, weight_epoch: int) -> str:
    """Describes in one line the tokens and times of a generation."""
    queue, prefill, decode = (
        duration.ToTimedelta().total_seconds()
        for duration in (usage.queue_duration, usage.prefill_duration, usage.decode_duration)
    )
    # The prefill gives the first token.
    rate = f" ({(usage.generated_tokens - 1) / decode:.1f} tokens/s)" if decode and usage.generated_tokens > 1 else ""
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_prompt_tokens} cached),"
        f" {usage.generated_tokens} generated, finish {finish}, queue {queue * 1e3:.0f} ms,"
        f" prefill {prefill * 1e3:.0f} ms, decode {decode * 1e3:.0f} ms{rate}, weight epoch {weight_epoch}"
    )
