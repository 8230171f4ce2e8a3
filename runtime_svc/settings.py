"""The service's options and settings; only this file reads the command line and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Final

from bundle.errors import FieldViolation
from bundle.manifest import TargetKind
from edge.access.principal import Principal, Scope
from edge.config import EdgeConfig, LocalListener
from edge.errors import OptionsInvalid
from edge.logs import LogConfig
from edge.loopback import is_loopback
from edge.memory import measure_memory
from edge.option_sources import read_options
from edge.options import (
    ABSOLUTE_PATH,
    ADDRESS,
    COUNT,
    FLAG,
    NAMED_ADDRESS,
    PATH,
    SECONDS,
    SIZE,
    TEXT,
    one_of,
    option,
    option_class,
    section,
)
from execution.ranks.watchdog import MIN_STEP_TIMEOUT_S
from execution.text.handle import TextLimits
from runtime_svc.bundles.grpc_source import CompilerEndpoint
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from runtime_svc.engine.request import SessionLimits, StallTimeouts
from targets.registry import TARGETS

#: The share of this process's memory that deployments may use; the rest is for code and scratch memory of the ranks.
_MEMORY_SHARE: Final = 0.8

#: Who calls at `gateway-address`: a gateway shows no token, and asks its own clients for one.
_GATEWAY: Final = Principal("gateway", frozenset({Scope.INFER}))


@option_class(kw_only=True)
class Settings:
    """The settings of one runtime: its options, and what follows from several of them.

    `compiler` is the BundleService's address, and TLS; None if bundles come from directories only.
    """

    edge: EdgeConfig = section(EdgeConfig)
    logs: LogConfig = section(LogConfig)
    gateway_address: str | None = option(
        ADDRESS,
        "a second address, on loopback, for a gateway on this host: its calls need no token, and are those of the "
        "principal `gateway` with the scope `infer`; all who reach the address have that",
        default=None,
        default_text="nowhere",
    )
    compiler_address: str | None = option(
        ADDRESS, "the BundleService; needed unless `bundles` is given", name="compiler", default=None
    )
    bundles: tuple[Path, ...] = option(
        ABSOLUTE_PATH,
        "OCI image layout, unpacked bundle or directory of these, to take bundles from before the compiler is asked",
        default=(),
        is_repeatable=True,
    )
    compiler_ca: Path | None = option(PATH, "certificates that the compiler's one must lead to, PEM", default=None)
    compiler_certificate: Path | None = option(PATH, "certificate chain for the compiler, PEM", default=None)
    compiler_key: Path | None = option(PATH, "its private key, PEM", default=None)
    compiler_token_file: Path | None = option(
        ABSOLUTE_PATH,
        "token that the compiler is shown, read again when it changes; it needs the scope `load`",
        default=None,
        default_text="no token",
    )
    store: Path | None = option(
        ABSOLUTE_PATH, "the BundleService's own layout, if it is on this host", name="bundle-store", default=None
    )
    cache: Path = option(ABSOLUTE_PATH, "directory for fetched blobs")
    state: Path = option(
        ABSOLUTE_PATH,
        "directory for what outlives a restart",
        derive=lambda given: given.cache,
        default_text="the cache",
    )
    verify_always: bool = option(
        one_of(cached=False, always=True),
        "hash blobs once, or at every load",
        name="verify",
        default=False,
        default_text="cached",
    )
    target: TargetKind = option(
        one_of(*TARGETS),
        "hardware of this host, which bundles must be made for; no NeuronCore has been tried with Kiln",
        default="cpu",
    )
    #: 0 stands for all that the host has, until `settle_cores` has counted them.
    num_cores: int = option(
        COUNT,
        "logical cores, one for each rank",
        name="cores",
        derive=lambda given: 0 if TARGETS[given.target].has_cores else os.cpu_count() or 1,
        default_text="one for each processor; all cores of this host on Neuron targets",
    )
    #: 0 stands for the default, until `parse_settings` has chosen it.
    logical_core_size: int = option(
        COUNT,
        "physical NeuronCores of a logical one (LNC), which bundles must be made for",
        default=0,
        default_text="NEURON_LOGICAL_NC_CONFIG, or the target's: 2 on trn2 and trn3, 1 elsewhere",
    )
    threads_per_core: int = option(COUNT, "threads that a rank computes with", default=1)
    warm_threads: int | None = option(
        COUNT,
        "load at the start what ranks with so many threads need, 300 MB, which their first bundle would wait for",
        default=None,
        default_text="their first bundle waits",
    )
    memory_bytes: int = option(
        SIZE,
        "for weights and KV caches",
        derive=lambda _: int(measure_memory() * _MEMORY_SHARE),
        default_text=f"{_MEMORY_SHARE} of what this process may use",
    )
    capture_directory: Path | None = option(
        ABSOLUTE_PATH,
        "directory for the inputs of requests' steps, with those of others in the batch",
        default=None,
        default_text="no captures",
    )
    deployments_file: Path | None = option(
        ABSOLUTE_PATH, "YAML or JSON: the deployments to have", name="deployments", default=None
    )
    engine_deployment: str | None = option(
        TEXT,
        "deployment that vLLM's engine API, which names none, speaks for",
        default=None,
        default_text="the only one that serves",
    )
    engine_adapters: tuple[tuple[str, str], ...] = option(
        NAMED_ADDRESS,
        "an adapter of that deployment, and a further address that speaks the engine API alone, for it, with its name "
        "as the model's; callers are those of `gateway-address` if it is given, or else those of `address`",
        name="engine-adapter",
        default=(),
        is_repeatable=True,
    )
    follow_interval_s: float = option(SECONDS, "how often to ask which versions followed aliases name", default=5.0)
    queue_capacity: int = option(
        COUNT, "requests that may wait for a slot; each sequence counts", default=EngineConfig().queue_capacity
    )
    max_call_sequences: int = option(
        COUNT,
        "sequences that a request may ask for, at most as many as may run and wait at once",
        name="max-sequences-per-request",
        default=EngineConfig().max_call_sequences,
    )
    stream_capacity: int = option(
        COUNT, "events of a sequence that may wait for a slow client", default=EngineConfig().stream_capacity
    )
    max_chunk_tokens: int = option(
        COUNT,
        "tokens of a prompt that a step may compute while sequences wait for their next token; a longer prompt delays "
        "them by one such step at a time. Executables that spend time on padding compute a whole bucket: the largest "
        "of at most so many tokens, or else the smallest",
        default=ChunkLimits().max_tokens,
    )
    target_inter_token_latency_s: float | None = option(
        SECONDS,
        "time between two tokens of a sequence, a chunk of another one's prompt included, that chunks are chosen for "
        "by measured times of steps: `max-chunk-tokens`, a half of them, a quarter and so on; a bucket where "
        "executables spend time on padding",
        default=None,
        default_text="chunks of `max-chunk-tokens`, whatever time they take",
    )
    async_scheduling: bool = option(
        FLAG,
        "call a step while the one before it runs, if only its tokens are missing; without, the engine calls steps one "
        "by one, which gives the same tokens later",
        default=True,
    )
    max_stall_timeout_s: float = option(
        SECONDS,
        "longest stall timeout that a client may choose for its Generate; never less than `stall-timeout`",
        default=StallTimeouts.max_s,
    )
    session_ttl_s: float = option(
        SECONDS,
        "time after its last request for which a session is kept, if the client chooses none",
        default=SessionLimits.default_ttl_s,
    )
    max_session_ttl_s: float = option(
        SECONDS,
        "longest such time that a client may choose; never less than `session-ttl`",
        default=SessionLimits.max_ttl_s,
    )
    max_sessions: int = option(
        COUNT,
        "sessions of a deployment; for one more, the session unused for longest is forgotten",
        default=SessionLimits.max_sessions,
    )
    max_caller_sessions: int = option(
        COUNT, "sessions of one caller, likewise", default=SessionLimits.max_caller_sessions
    )
    min_step_timeout_s: float = option(
        SECONDS,
        "time that every step may take; longer after slow steps, ten times as long while its ranks compute",
        default=MIN_STEP_TIMEOUT_S,
    )
    text_timeout_s: float = option(
        SECONDS,
        "processor time that the chat template and the tokenizer may take for one prompt",
        default=TextLimits().timeout_s,
    )
    text_memory_bytes: int = option(
        SIZE,
        "memory of each deployment's text process",
        default=TextLimits().max_memory_bytes,
        default_text="2GiB",
    )
    compiler: CompilerEndpoint | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiler", self._make_endpoint())

    @property
    def engine(self) -> EngineConfig:
        """What every deployment's engine keeps to."""
        return EngineConfig(
            queue_capacity=self.queue_capacity,
            max_call_sequences=self.max_call_sequences,
            stream_capacity=self.stream_capacity,
            chunks=ChunkLimits(self.max_chunk_tokens, self.target_inter_token_latency_s),
            async_scheduling=self.async_scheduling,
            stall_timeouts=StallTimeouts(
                self.edge.stall_timeout_s, max(self.edge.stall_timeout_s, self.max_stall_timeout_s)
            ),
            session_limits=SessionLimits(
                default_ttl_s=self.session_ttl_s,
                max_ttl_s=max(self.session_ttl_s, self.max_session_ttl_s),
                max_sessions=self.max_sessions,
                max_caller_sessions=self.max_caller_sessions,
            ),
        )

    @property
    def text_limits(self) -> TextLimits:
        """What the text process of a deployment may take."""
        return TextLimits(timeout_s=self.text_timeout_s, max_memory_bytes=self.text_memory_bytes)

    def _make_endpoint(self) -> CompilerEndpoint | None:
        if self.compiler_address is None:
            if not self.bundles:
                raise OptionsInvalid([FieldViolation("compiler, bundles", "neither", "one of them, or both")])
            return None
        has_certificate, has_key = self.compiler_certificate is not None, self.compiler_key is not None
        if has_certificate != has_key or (has_certificate and self.compiler_ca is None):
            violation = FieldViolation(
                "compiler-certificate, compiler-key, compiler-ca",
                "some of them",
                "the first two together, with the third",
            )
            raise OptionsInvalid([violation])
        return CompilerEndpoint(
            self.compiler_address,
            ca_path=self.compiler_ca,
            certificate_path=self.compiler_certificate,
            key_path=self.compiler_key,
            token_path=self.compiler_token_file,
            allow_insecure=self.edge.allow_insecure,
        )


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the options; exits with a message if the command line has an unknown one."""
    settings = read_options("runtime", Settings, arguments, environment)
    return replace(
        settings,
        edge=replace(
            settings.edge,
            local_listener=_make_gateway_listener(settings),
            side_addresses=tuple(address for _, address in settings.engine_adapters),
        ),
        logical_core_size=_choose_core_size(settings, environment),
    )


def _make_gateway_listener(settings: Settings) -> LocalListener | None:
    address = settings.gateway_address
    if address is None:
        return None
    given = [("gateway-address", address), *(("engine-adapter", one) for _, one in settings.engine_adapters)]
    accepted = "HOST:PORT on loopback, such as 127.0.0.1:50053"
    violations = [FieldViolation(name, repr(one), accepted) for name, one in given if not is_loopback(one)]
    if violations:
        raise OptionsInvalid(violations)
    return LocalListener(address, _GATEWAY)


def _choose_core_size(settings: Settings, environment: Mapping[str, str]) -> int:
    """Reads how many physical cores a logical one has: the option, or the variable that the target's library reads."""
    target = TARGETS[settings.target]
    variable = target.lowerings[0].format.core_size_variable
    given = str(settings.logical_core_size or environment.get(variable) or target.logical_core_size)
    accepted = [str(size) for size in target.logical_core_sizes]
    if given not in accepted:
        name = "logical-core-size" if settings.logical_core_size else variable
        raise OptionsInvalid([FieldViolation(name, given, f"{' or '.join(accepted)} on {target.kind}")])
    return int(given)
