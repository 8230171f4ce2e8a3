"""The service's options and settings; only this file reads the command line and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bundle.errors import FieldViolation
from bundle.manifest import TargetKind
from edge.access.principal import Principal, Scope
from edge.config import EdgeConfig, LocalListener, is_loopback
from edge.errors import OptionsInvalid
from edge.logs import LogConfig
from edge.memory import measure_memory
from edge.option_sources import read_options
from edge.options import (
    ADDRESS,
    COUNT,
    FLAG,
    PATH,
    SECONDS,
    SERVER_OPTIONS,
    SIZE,
    TEXT,
    Option,
    one_of,
    read_edge_config,
    read_log_config,
)
from execution.ranks.watchdog import MIN_STEP_TIMEOUT_S
from execution.text.handle import TextLimits
from runtime_svc.bundles.channel import CompilerEndpoint
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from runtime_svc.engine.request import SessionLimits, StallTimeouts
from targets.registry import TARGETS

#: The share of this process's memory that deployments may use; the rest is for code and scratch memory of the ranks.
_MEMORY_SHARE: Final = 0.8

#: Who calls at `gateway-address`: a gateway shows no token, and asks its own clients for one.
_GATEWAY: Final = Principal("gateway", frozenset({Scope.INFER}))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one runtime.

    Attributes:
        edge: Address, limits, TLS.
        compiler: Address of the BundleService, and TLS; None if bundles come from directories only.
        bundles: Directories of bundles that others fill; only read.
        store: The BundleService's own layout if it is on this host; None fetches every blob.
        cache: Directory of fetched blobs, and of the record of verified files.
        state: Directory of the deployments' records, which outlive a restart.
        verify_always: Whether to hash every blob at every load, even if it has been verified before.
        target: The hardware of this host.
        logical_core_size: Physical cores of a logical core of the target.
        num_cores: Number of logical cores for deployments; 0 for all that the host has of the target, until
            `settle_cores` has counted them.
        threads_per_core: Threads that a rank computes with if its deployment sets no number.
        memory_bytes: Memory that deployments may use.
        capture_directory: Directory of captured inputs; None refuses requests that ask for them.
        deployments_file: File that declares deployments; None leaves loading to calls.
        engine_deployment: The deployment that vLLM's engine API speaks for; None for the only one that serves.
        follow_interval_s: Pause between two looks at the followed aliases.
        queue_capacity: Requests of one deployment that may wait for a slot.
        max_call_sequences: Sequences of one Generate.
        stream_capacity: Events that may wait for a slow client before its sequence is paused.
        chunks: How long sequences may wait for their next token while a step computes a part of a prompt.
        async_scheduling: Whether a step is called while the one before it runs.
        stall_timeouts: How long responses may wait for clients that do not read.
        session_limits: How many sessions there may be, and for how long.
        min_step_timeout_s: Time after which a step whose ranks stand still counts as hung.
        text_limits: What the text process of a deployment may take.
        logs: What is logged, and where.
    """

    edge: EdgeConfig
    compiler: CompilerEndpoint | None
    bundles: tuple[Path, ...]
    store: Path | None
    cache: Path
    state: Path
    verify_always: bool
    target: TargetKind
    logical_core_size: int
    num_cores: int
    threads_per_core: int
    memory_bytes: int
    capture_directory: Path | None
    deployments_file: Path | None
    engine_deployment: str | None
    follow_interval_s: float
    queue_capacity: int
    max_call_sequences: int
    stream_capacity: int
    chunks: ChunkLimits
    async_scheduling: bool
    stall_timeouts: StallTimeouts
    session_limits: SessionLimits
    min_step_timeout_s: float
    text_limits: TextLimits
    logs: LogConfig


OPTIONS: Final = (
    *SERVER_OPTIONS,
    Option(
        "gateway-address",
        ADDRESS,
        "a second address, on loopback, for a gateway on this host: its calls need no token, and are those of the "
        "principal `gateway` with the scope `infer`; all who reach the address have that",
        default_text="nowhere",
    ),
    Option("compiler", ADDRESS, "the BundleService; needed unless `bundles` is given"),
    Option(
        "bundles",
        PATH,
        "OCI image layout, unpacked bundle or directory of these, to take bundles from before the compiler is asked",
        default=(),
        is_repeatable=True,
    ),
    Option("compiler-ca", PATH, "certificates that the compiler's one must lead to, PEM"),
    Option("compiler-certificate", PATH, "certificate chain for the compiler, PEM"),
    Option("compiler-key", PATH, "its private key, PEM"),
    Option(
        "compiler-token-file",
        PATH,
        "token that the compiler is shown, read again when it changes; it needs the scope `load`",
        default_text="no token",
    ),
    Option("bundle-store", PATH, "the BundleService's own layout, if it is on this host"),
    Option("cache", PATH, "directory for fetched blobs", is_required=True),
    Option("state", PATH, "directory for what outlives a restart", default_text="the cache"),
    Option("verify", one_of("cached", "always"), "hash blobs once, or at every load", default="cached"),
    Option(
        "target",
        one_of(*TARGETS),
        "hardware of this host, which bundles must be made for; no NeuronCore has been tried with Kiln",
        default="cpu",
    ),
    Option(
        "cores",
        COUNT,
        "logical cores, one for each rank",
        default_text="one for each processor; all cores of this host on Neuron targets",
    ),
    Option(
        "logical-core-size",
        COUNT,
        "physical NeuronCores of a logical one (LNC), which bundles must be made for",
        default_text="NEURON_LOGICAL_NC_CONFIG, or the target's: 2 on trn2 and trn3, 1 elsewhere",
    ),
    Option("threads-per-core", COUNT, "threads that a rank computes with", default=1),
    Option("memory", SIZE, "for weights and KV caches", default_text=f"{_MEMORY_SHARE} of what this process may use"),
    Option(
        "capture-directory",
        PATH,
        "directory for the inputs of requests' steps, with those of others in the batch",
        default_text="no captures",
    ),
    Option("deployments", PATH, "YAML or JSON: the deployments to have"),
    Option(
        "engine-deployment",
        TEXT,
        "deployment that vLLM's engine API, which names none, speaks for",
        default_text="the only one that serves",
    ),
    Option("follow-interval", SECONDS, "how often to ask which versions followed aliases name", default=5.0),
    Option(
        "queue-capacity",
        COUNT,
        "requests that may wait for a slot; each sequence counts",
        default=EngineConfig().queue_capacity,
    ),
    Option(
        "max-sequences-per-request",
        COUNT,
        "sequences that a request may ask for, at most as many as may run and wait at once",
        default=EngineConfig().max_call_sequences,
    ),
    Option(
        "stream-capacity",
        COUNT,
        "events of a sequence that may wait for a slow client",
        default=EngineConfig().stream_capacity,
    ),
    Option(
        "max-chunk-tokens",
        COUNT,
        "tokens of a prompt that a step may compute while sequences wait for their next token; a longer prompt delays "
        "them by one such step at a time. Executables that spend time on padding compute a whole bucket: the largest "
        "of at most so many tokens, or else the smallest",
        default=ChunkLimits().max_tokens,
    ),
    Option(
        "target-inter-token-latency",
        SECONDS,
        "time between two tokens of a sequence, a chunk of another one's prompt included, that chunks are chosen for "
        "by measured times of steps: `max-chunk-tokens`, a half of them, a quarter and so on; a bucket where "
        "executables spend time on padding",
        default_text="chunks of `max-chunk-tokens`, whatever time they take",
    ),
    Option(
        "async-scheduling",
        FLAG,
        "call a step while the one before it runs, if only its tokens are missing; without, the engine calls steps one "
        "by one, which gives the same tokens later",
        default=True,
    ),
    Option(
        "max-stall-timeout",
        SECONDS,
        "longest stall timeout that a client may choose for its Generate; never less than `stall-timeout`",
        default=StallTimeouts.max_s,
    ),
    Option(
        "session-ttl",
        SECONDS,
        "time after its last request for which a session is kept, if the client chooses none",
        default=SessionLimits.default_ttl_s,
    ),
    Option(
        "max-session-ttl",
        SECONDS,
        "longest such time that a client may choose; never less than `session-ttl`",
        default=SessionLimits.max_ttl_s,
    ),
    Option(
        "max-sessions",
        COUNT,
        "sessions of a deployment; for one more, the session unused for longest is forgotten",
        default=SessionLimits.max_sessions,
    ),
    Option("max-caller-sessions", COUNT, "sessions of one caller, likewise", default=SessionLimits.max_caller_sessions),
    Option(
        "min-step-timeout",
        SECONDS,
        "time that every step may take; longer after slow steps, ten times as long while its ranks compute",
        default=MIN_STEP_TIMEOUT_S,
    ),
    Option(
        "text-timeout",
        SECONDS,
        "processor time that the chat template and the tokenizer may take for one prompt",
        default=TextLimits().timeout_s,
    ),
    Option(
        "text-memory",
        SIZE,
        "memory of each deployment's text process",
        default=TextLimits().max_memory_bytes,
        default_text="2 GiB",
    ),
)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the options; exits with a message if the command line has an unknown one.

    Raises:
        OptionsInvalid: See `read_options`; or options contradict each other.
        AddressInvalid, PlaintextRefused: See `EdgeConfig` and `CompilerEndpoint`.
    """
    options = read_options("runtime", OPTIONS, arguments, environment)
    return Settings(
        edge=read_edge_config(options, local_listener=_read_gateway_listener(options)),
        compiler=_read_endpoint(options),
        bundles=tuple(path.absolute() for path in options.bundles),
        store=_absolute(options.bundle_store),
        cache=options.cache.absolute(),
        state=(options.state or options.cache).absolute(),
        verify_always=options.verify == "always",
        target=options.target,
        logical_core_size=_read_core_size(options, environment),
        num_cores=options.cores or (0 if TARGETS[options.target].has_cores else os.cpu_count() or 1),
        threads_per_core=options.threads_per_core,
        memory_bytes=options.memory or int(measure_memory() * _MEMORY_SHARE),
        capture_directory=_absolute(options.capture_directory),
        deployments_file=_absolute(options.deployments),
        engine_deployment=options.engine_deployment,
        follow_interval_s=options.follow_interval,
        queue_capacity=options.queue_capacity,
        max_call_sequences=options.max_sequences_per_request,
        stream_capacity=options.stream_capacity,
        chunks=ChunkLimits(options.max_chunk_tokens, options.target_inter_token_latency),
        async_scheduling=options.async_scheduling,
        stall_timeouts=StallTimeouts(options.stall_timeout, max(options.stall_timeout, options.max_stall_timeout)),
        session_limits=SessionLimits(
            default_ttl_s=options.session_ttl,
            max_ttl_s=max(options.session_ttl, options.max_session_ttl),
            max_sessions=options.max_sessions,
            max_caller_sessions=options.max_caller_sessions,
        ),
        min_step_timeout_s=options.min_step_timeout,
        text_limits=TextLimits(timeout_s=options.text_timeout, max_memory_bytes=options.text_memory),
        logs=read_log_config(options),
    )


def _read_gateway_listener(options: Any) -> LocalListener | None:
    address = options.gateway_address
    if address is None:
        return None
    if not is_loopback(address):
        accepted = "HOST:PORT on loopback, such as 127.0.0.1:50053"
        raise OptionsInvalid([FieldViolation("gateway-address", repr(address), accepted)])
    return LocalListener(address, _GATEWAY)


def _read_core_size(options: Any, environment: Mapping[str, str]) -> int:
    """Reads how many physical cores a logical one has: the option, or the variable that the target's library reads."""
    target = TARGETS[options.target]
    variable = target.lowerings[0].format.core_size_variable
    given = str(options.logical_core_size or environment.get(variable) or target.logical_core_size)
    accepted = [str(size) for size in target.logical_core_sizes]
    if given not in accepted:
        name = "logical-core-size" if options.logical_core_size else variable
        raise OptionsInvalid([FieldViolation(name, given, f"{' or '.join(accepted)} on {target.kind}")])
    return int(given)


def _read_endpoint(options: Any) -> CompilerEndpoint | None:
    if options.compiler is None:
        if not options.bundles:
            raise OptionsInvalid([FieldViolation("compiler, bundles", "neither", "one of them, or both")])
        return None
    has_certificate, has_key = options.compiler_certificate is not None, options.compiler_key is not None
    if has_certificate != has_key or (has_certificate and options.compiler_ca is None):
        violation = FieldViolation(
            "compiler-certificate, compiler-key, compiler-ca", "some of them", "the first two together, with the third"
        )
        raise OptionsInvalid([violation])
    return CompilerEndpoint(
        options.compiler,
        ca_path=options.compiler_ca,
        certificate_path=options.compiler_certificate,
        key_path=options.compiler_key,
        token_path=_absolute(options.compiler_token_file),
        allow_insecure=options.allow_insecure,
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()
