"""The service's options and settings; only this file reads the command line and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
    ABSOLUTE_PATH,
    COUNT,
    DAYS,
    PATH,
    SECONDS,
    SIZE,
    TEXT,
    Domain,
    one_of,
    option,
    option_class,
    section,
)
from targets.cpu import CPU
from targets.isa import NATIVE
from targets.neuron import FRONT_END, NEURON_PYTHON, TOP_K, TOP_K_WAYS

#: Share of this process's memory limit; the rest is for the service, build processes and other processes.
_LOWERING_SHARE: Final = 0.75
#: With less memory, even small models fail to compile.
_LEAST_LOWERING_BYTES: Final = 4 << 30


MODEL_URL: Final = Domain(
    "file://, memory://, hf:// or s3:// with a plain path; s3:// needs kiln-compiler[s3]", "URL", check_prefix
)


@option_class(kw_only=True)
class Settings:
    """Settings of one compiler, which keeps its state beside the blobs of its store."""

    edge: EdgeConfig = section(EdgeConfig)
    logs: LogConfig = section(LogConfig)
    store: Path = option(ABSOLUTE_PATH, "OCI layout that bundles are published in")
    database_url: str = option(
        TEXT,
        "SQLAlchemy URL",
        name="database",
        derive=lambda given: f"sqlite:///{given.store / 'kiln.db'}",
        default_text="an SQLite file beside the store's blobs",
    )
    model_roots: tuple[Path, ...] = option(
        ABSOLUTE_PATH, "directory of checkpoints", name="model-root", is_repeatable=True
    )
    model_urls: tuple[str, ...] = option(
        MODEL_URL,
        "prefix of URLs that may name a checkpoint, such as s3://bucket/models",
        name="model-url",
        default=(),
        is_repeatable=True,
        default_text="none",
    )
    fetch_timeout_s: float = option(SECONDS, "time that fetching one checkpoint from a URL may take", default=3600.0)
    fetched_bytes: int | None = option(
        SIZE,
        "what all checkpoints fetched from URLs may take; those used longest ago go first",
        name="fetched-size",
        default=None,
        default_text="no limit",
    )
    import_roots: tuple[Path, ...] = option(
        ABSOLUTE_PATH,
        "directory of OCI image layouts that bundles may be imported from",
        name="import-root",
        default=(),
        is_repeatable=True,
    )
    cache: Path = option(ABSOLUTE_PATH, "directory for the code generator's caches")
    max_builds: int = option(COUNT, "builds that run at once", default=1)
    max_waiting: int = option(COUNT, "compiles that may wait beside them", default=16)
    max_builds_per_principal: int = option(COUNT, "builds that one principal may have, running or waiting", default=16)
    num_lowerings: int = option(
        COUNT,
        "lowerings of one build that run at once",
        name="lowerings",
        default=os.cpu_count() or 1,
        default_text="one for each processor",
    )
    lowering_timeout_s: float = option(SECONDS, "time that one lowering may take", default=1800.0)
    #: Besides the size of the model's tensors.
    lowering_memory_bytes: int = option(
        SIZE,
        "memory of each process of one lowering",
        derive=lambda given: choose_lowering_memory(measure_memory(), given.num_lowerings * given.max_builds),
        default_text=f"its share of {_LOWERING_SHARE} of the host's",
    )
    build_idle_timeout_s: float = option(
        SECONDS, "time that a build may go without computing; then it is killed", default=BUILD_IDLE_TIMEOUT_S
    )
    default_isa: str = option(
        one_of(*CPU.isas.names, NATIVE), "CPU instruction set of compiles that name none", default=CPU.isas.default
    )
    neuron_python: Path | None = option(
        PATH,
        "Python with kiln-neuron-lowering and Neuron's packages, which compiles for Neuron targets",
        default=None,
        default_text="the compiler's own Python, if it has them",
    )
    neuron_front_end: str | None = option(
        one_of(*FRONT_ENDS),
        f"what makes NEFFs of submodels in that Python; reserved and refused: {', '.join(RESERVED_FRONT_ENDS)}",
        default=None,
        default_text=NEURON_PYTHON.choices[FRONT_END].default,
    )
    neuron_top_k: str | None = option(
        one_of(*TOP_K_WAYS),
        "how graphs for Neuron take candidates: by a single call, or by calls that neuronx-cc is on record to compile",
        default=None,
        default_text=NEURON_PYTHON.choices[TOP_K].default,
    )
    checks_on_cores: bool = option(
        one_of(free=True, none=False),
        "NeuronCores of this host that golden checks take; XLA on the CPU computes where there is none",
        name="golden-cores",
        default=True,
        default_text="free",
    )
    keep_operations: int = option(COUNT, "finished operations that are remembered", default=10_000)
    keep_operations_days: float = option(DAYS, "how long finished operations are remembered", default=30.0)

    @property
    def urls(self) -> UrlSettings:
        """URLs that may name a checkpoint, and where fetched ones are kept."""
        return (
            UrlSettings(self.model_urls, self.cache / "checkpoints", self.fetched_bytes) if self.model_urls else NO_URLS
        )

    @property
    def retention(self) -> Retention:
        """How long finished operations are remembered."""
        return Retention(self.keep_operations, self.keep_operations_days)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the options; exits with a message if the command line has an unknown one."""
    return read_options("compiler", Settings, arguments, environment)


def choose_lowering_memory(total_bytes: int, num_lowerings: int) -> int:
    """Chooses the memory of each of several simultaneous lowerings, in bytes, if no option sets it."""
    return max(_LEAST_LOWERING_BYTES, int(total_bytes * _LOWERING_SHARE) // num_lowerings)
