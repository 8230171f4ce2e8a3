"""The service's options and settings; only this file reads the command line and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler_svc.compiles.build_runner import BUILD_IDLE_TIMEOUT_S
from compiler_svc.compiles.journal import Retention
from compiler_svc.lower.neuron.request import FRONT_ENDS, RESERVED_FRONT_ENDS
from compiler_svc.remote.urls import NO_URLS, UrlSettings, check_prefix
from edge.config import EdgeConfig
from edge.logs import LogConfig
from edge.memory import measure_memory
from edge.option_sources import read_options
from edge.options import (
    COUNT,
    DAYS,
    PATH,
    SECONDS,
    SERVER_OPTIONS,
    SIZE,
    TEXT,
    Domain,
    Option,
    one_of,
    read_edge_config,
    read_log_config,
)
from targets.cpu import CPU
from targets.isa import NATIVE
from targets.neuron import FRONT_END, NEURON_PYTHON

#: Share of this process's memory limit; the rest is for the service, build processes and other processes.
_LOWERING_SHARE: Final = 0.75
#: With less memory, even small models fail to compile.
_LEAST_LOWERING_BYTES: Final = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one compiler.

    Attributes:
        edge: Address, limits, TLS.
        store: OCI layout that bundles are published in; this compiler keeps its other state beside the blobs.
        database_url: SQLAlchemy URL.
        model_roots: Directories that may contain checkpoints.
        urls: URLs that may name a checkpoint, and where fetched ones are kept.
        fetch_timeout_s: Time limit of fetching one checkpoint.
        import_roots: Directories that may contain layouts to import bundles from.
        cache: Directory of the code generator's caches.
        max_builds: Number of builds that run at once.
        max_waiting: Number of compiles that may wait while those builds run.
        max_builds_per_principal: Number of compiles, running or waiting, that one principal may have.
        num_lowerings: Number of lowerings of one build that run at once.
        lowering_timeout_s: Time limit of one lowering.
        lowering_memory_bytes: Memory limit of each process of one lowering, besides the size of the model's tensors.
        build_idle_timeout_s: Time that a build may go without computing.
        default_isa: CPU instruction set of compiles that name none.
        neuron_python: Python with Neuron's packages; None: this one, if it has them.
        neuron_front_end: What makes NEFFs of submodels there; None: the default.
        checks_on_cores: Whether golden checks of NEFFs may take cores of this host.
        retention: How long finished operations are remembered.
        logs: What is logged, and where.
    """

    edge: EdgeConfig
    store: Path
    database_url: str
    model_roots: tuple[Path, ...]
    urls: UrlSettings
    fetch_timeout_s: float
    import_roots: tuple[Path, ...]
    cache: Path
    max_builds: int
    max_waiting: int
    max_builds_per_principal: int
    num_lowerings: int
    lowering_timeout_s: float
    lowering_memory_bytes: int
    build_idle_timeout_s: float
    default_isa: str
    neuron_python: Path | None
    neuron_front_end: str | None
    checks_on_cores: bool
    retention: Retention
    logs: LogConfig


#: What `--golden-cores` accepts.
_FREE_CORES: Final = "free"
_NO_CORES: Final = "none"
MODEL_URL: Final = Domain(
    "file://, memory://, hf:// or s3:// with a plain path; s3:// needs kiln-compiler[s3]", "URL", check_prefix
)

OPTIONS: Final = (
    *SERVER_OPTIONS,
    Option("store", PATH, "OCI layout that bundles are published in", is_required=True),
    Option("database", TEXT, "SQLAlchemy URL", default_text="an SQLite file beside the store's blobs"),
    Option("model-root", PATH, "directory of checkpoints", is_required=True, is_repeatable=True),
    Option(
        "model-url",
        MODEL_URL,
        "prefix of URLs that may name a checkpoint, such as s3://bucket/models",
        default=(),
        is_repeatable=True,
        default_text="none",
    ),
    Option("fetch-timeout", SECONDS, "time that fetching one checkpoint from a URL may take", default=3600.0),
    Option(
        "fetched-size",
        SIZE,
        "what all checkpoints fetched from URLs may take; those used longest ago go first",
        default_text="no limit",
    ),
    Option(
        "import-root",
        PATH,
        "directory of OCI image layouts that bundles may be imported from",
        default=(),
        is_repeatable=True,
    ),
    Option("cache", PATH, "directory for the code generator's caches", is_required=True),
    Option("max-builds", COUNT, "builds that run at once", default=1),
    Option("max-waiting", COUNT, "compiles that may wait beside them", default=16),
    Option("max-builds-per-principal", COUNT, "builds that one principal may have, running or waiting", default=16),
    Option(
        "lowerings",
        COUNT,
        "lowerings of one build that run at once",
        default=os.cpu_count() or 1,
        default_text="one for each processor",
    ),
    Option("lowering-timeout", SECONDS, "time that one lowering may take", default=1800.0),
    Option(
        "lowering-memory",
        SIZE,
        "memory of each process of one lowering",
        default_text=f"its share of {_LOWERING_SHARE} of the host's",
    ),
    Option(
        "build-idle-timeout",
        SECONDS,
        "time that a build may go without computing; then it is killed",
        default=BUILD_IDLE_TIMEOUT_S,
    ),
    Option(
        "default-isa",
        one_of(*CPU.isas.names, NATIVE),
        "CPU instruction set of compiles that name none",
        default=CPU.isas.default,
    ),
    Option(
        "neuron-python",
        PATH,
        "Python with kiln-neuron-lowering and Neuron's packages, which compiles for Neuron targets",
        default_text="the compiler's own Python, if it has them",
    ),
    Option(
        "neuron-front-end",
        one_of(*FRONT_ENDS),
        f"what makes NEFFs of submodels in that Python; reserved and refused: {', '.join(RESERVED_FRONT_ENDS)}",
        default_text=NEURON_PYTHON.choices[FRONT_END].default,
    ),
    Option(
        "golden-cores",
        one_of(_FREE_CORES, _NO_CORES),
        "NeuronCores of this host that golden checks take; XLA on the CPU computes where there is none",
        default=_FREE_CORES,
    ),
    Option("keep-operations", COUNT, "finished operations that are remembered", default=10_000),
    Option("keep-operations-days", DAYS, "how long finished operations are remembered", default=30.0),
)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the options; exits with a message if the command line has an unknown one.

    Raises:
        OptionsInvalid: See `read_options`; or options contradict each other.
        AddressInvalid, PlaintextRefused: See `EdgeConfig`.
    """
    options = read_options("compiler", OPTIONS, arguments, environment)
    store: Path = options.store.absolute()
    return Settings(
        edge=read_edge_config(options),
        store=store,
        database_url=options.database or f"sqlite:///{store / 'kiln.db'}",
        model_roots=tuple(root.absolute() for root in options.model_root),
        urls=UrlSettings(tuple(options.model_url), (options.cache / "checkpoints").absolute(), options.fetched_size)
        if options.model_url
        else NO_URLS,
        fetch_timeout_s=options.fetch_timeout,
        import_roots=tuple(root.absolute() for root in options.import_root),
        cache=options.cache.absolute(),
        max_builds=options.max_builds,
        max_waiting=options.max_waiting,
        max_builds_per_principal=options.max_builds_per_principal,
        num_lowerings=options.lowerings,
        lowering_timeout_s=options.lowering_timeout,
        lowering_memory_bytes=options.lowering_memory
        or choose_lowering_memory(measure_memory(), options.lowerings * options.max_builds),
        build_idle_timeout_s=options.build_idle_timeout,
        default_isa=options.default_isa,
        neuron_python=options.neuron_python,
        neuron_front_end=options.neuron_front_end,
        checks_on_cores=options.golden_cores == _FREE_CORES,
        retention=Retention(keep=options.keep_operations, days=options.keep_operations_days),
        logs=read_log_config(options),
    )


def choose_lowering_memory(total_bytes: int, num_lowerings: int) -> int:
    """Chooses the memory of each of several simultaneous lowerings, in bytes, if no option sets it."""
    return max(_LEAST_LOWERING_BYTES, int(total_bytes * _LOWERING_SHARE) // num_lowerings)
