"""The service's settings, read from the command line here and nowhere else."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler_svc.compiles.journal import Retention
from edge.config import EdgeConfig
from edge.memory import measure_memory
from edge.options import add_server_options, byte_size, positive_integer, read_edge_config

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
        import_roots: Directories that may contain layouts to import bundles from.
        cache: Directory of the code generator's caches.
        max_builds: Number of builds that run at once.
        max_waiting: Number of compiles that may wait while those builds run.
        num_lowerings: Number of lowerings of one build that run at once.
        lowering_timeout_s: Time limit of one lowering.
        lowering_memory_bytes: Memory limit of each process of one lowering, besides the size of the model's tensors.
        retention: How long finished operations are remembered.
        log_level: Least severe level that the service logs.
    """

    edge: EdgeConfig
    store: Path
    database_url: str
    model_roots: tuple[Path, ...]
    import_roots: tuple[Path, ...]
    cache: Path
    max_builds: int
    max_waiting: int
    num_lowerings: int
    lowering_timeout_s: float
    lowering_memory_bytes: int
    retention: Retention
    log_level: str


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Reads the command line; exits with a message if it is invalid."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    store: Path = options.store.absolute()
    return Settings(
        edge=read_edge_config(parser, options),
        store=store,
        database_url=options.database or f"sqlite:///{store / 'kiln.db'}",
        model_roots=tuple(root.absolute() for root in options.model_root),
        import_roots=tuple(root.absolute() for root in options.import_root),
        cache=options.cache.absolute(),
        max_builds=options.max_builds,
        max_waiting=options.max_waiting,
        num_lowerings=options.lowerings,
        lowering_timeout_s=options.lowering_timeout,
        lowering_memory_bytes=options.lowering_memory
        or choose_lowering_memory(measure_memory(), options.lowerings * options.max_builds),
        retention=Retention(keep=options.keep_operations, days=options.keep_operations_days),
        log_level=options.log_level,
    )


def choose_lowering_memory(total_bytes: int, num_lowerings: int) -> int:
    """Chooses the memory of each of several simultaneous lowerings, in bytes, if the command line does not set it."""
    return max(_LEAST_LOWERING_BYTES, int(total_bytes * _LOWERING_SHARE) // num_lowerings)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compiler_svc", description="Serves Kiln's compiler.")
    add_server_options(parser)
    parser.add_argument("--store", required=True, type=Path, help="OCI layout that bundles are published in")
    parser.add_argument("--database", help="SQLAlchemy URL; default: an SQLite file beside the store's blobs")
    parser.add_argument(
        "--model-root", required=True, type=Path, action="append", help="directory of checkpoints; may be repeated"
    )
    parser.add_argument(
        "--import-root",
        type=Path,
        action="append",
        default=[],
        help="directory of OCI image layouts that bundles may be imported from; may be repeated",
    )
    parser.add_argument("--cache", required=True, type=Path, help="directory for the code generator's caches")
    parser.add_argument("--max-builds", type=positive_integer, default=1, help="builds that run at once")
    parser.add_argument("--max-waiting", type=positive_integer, default=16, help="compiles that may wait beside them")
    parser.add_argument(
        "--lowerings",
        type=positive_integer,
        default=os.cpu_count() or 1,
        help="lowerings of one build that run at once",
    )
    parser.add_argument("--lowering-timeout", type=float, default=1800.0, help="seconds that one lowering may take")
    parser.add_argument(
        "--lowering-memory",
        type=byte_size,
        help="memory of each process of one lowering, such as 8GiB; default: its share of three quarters of the host's",
    )
    parser.add_argument(
        "--keep-operations", type=positive_integer, default=10_000, help="finished operations that are remembered"
    )
    parser.add_argument(
        "--keep-operations-days", type=float, default=30.0, help="days that finished operations are remembered"
    )
    return parser
