"""The service's settings; only this file reads the command line."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge.config import EdgeConfig
from edge.memory import measure_memory
from edge.options import add_server_options, byte_size, positive_integer, read_edge_config
from runtime_svc.bundles.channel import CompilerEndpoint

#: The share of this process's memory that deployments may use; the rest is for code and scratch memory of the ranks.
_MEMORY_SHARE: Final = 0.8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one runtime.

    Attributes:
        edge: Address, limits, TLS.
        compiler: Address of the BundleService, and TLS.
        store: The BundleService's own layout if it is on this host; None fetches every blob.
        cache: Directory of fetched blobs, and of the record of verified files.
        state: Directory of the deployments' records, which outlive a restart.
        verify_always: Whether to hash every blob at every load, even if it has been verified before.
        num_cores: Number of logical cores for deployments.
        threads_per_core: Threads that a rank computes with if its deployment sets no number.
        memory_bytes: Memory that deployments may use.
        capture_directory: Directory of captured inputs; None refuses requests that ask for them.
        deployments_file: File that declares deployments; None leaves loading to calls.
        follow_interval_s: Pause between two looks at the followed aliases.
        queue_capacity: Requests of one deployment that may wait for a slot.
        stream_capacity: Events that may wait for a slow client before its sequence is paused.
        log_level: Least severe level to log.
    """

    edge: EdgeConfig
    compiler: CompilerEndpoint
    store: Path | None
    cache: Path
    state: Path
    verify_always: bool
    num_cores: int
    threads_per_core: int
    memory_bytes: int
    capture_directory: Path | None
    deployments_file: Path | None
    follow_interval_s: float
    queue_capacity: int
    stream_capacity: int
    log_level: str


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Reads the command line; exits with a message if it is wrong."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    return Settings(
        edge=read_edge_config(parser, options),
        compiler=_read_endpoint(parser, options),
        store=options.bundle_store.absolute() if options.bundle_store is not None else None,
        cache=options.cache.absolute(),
        state=(options.state or options.cache).absolute(),
        verify_always=options.verify == "always",
        num_cores=options.cores,
        threads_per_core=options.threads_per_core,
        memory_bytes=options.memory or int(measure_memory() * _MEMORY_SHARE),
        capture_directory=options.capture_directory.absolute() if options.capture_directory is not None else None,
        deployments_file=options.deployments.absolute() if options.deployments is not None else None,
        follow_interval_s=options.follow_interval,
        queue_capacity=options.queue_capacity,
        stream_capacity=options.stream_capacity,
        log_level=options.log_level,
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime_svc", description="Serves Kiln's runtime.")
    add_server_options(parser)
    parser.add_argument("--compiler", required=True, help="host:port of the BundleService")
    parser.add_argument("--compiler-ca", type=Path, help="certificates that the compiler's one must lead to, PEM")
    parser.add_argument("--compiler-certificate", type=Path, help="certificate chain for the compiler, PEM")
    parser.add_argument("--compiler-key", type=Path, help="its private key, PEM")
    parser.add_argument("--bundle-store", type=Path, help="the BundleService's own layout, if it is on this host")
    parser.add_argument("--cache", required=True, type=Path, help="directory for fetched blobs")
    parser.add_argument("--state", type=Path, help="directory for what outlives a restart; default: the cache")
    parser.add_argument(
        "--verify", choices=("cached", "always"), default="cached", help="hash blobs once, or at every load"
    )
    parser.add_argument(
        "--cores", type=positive_integer, default=os.cpu_count() or 1, help="logical cores, one for each rank"
    )
    parser.add_argument(
        "--threads-per-core", type=positive_integer, default=1, help="threads that a rank computes with"
    )
    parser.add_argument(
        "--memory",
        type=byte_size,
        metavar="SIZE",
        help=f"for weights and KV caches, such as 6GiB; default: {_MEMORY_SHARE} of what this process may use",
    )
    parser.add_argument(
        "--capture-directory",
        type=Path,
        metavar="DIR",
        help="directory for the inputs of requests' steps, with those of others in the batch; default: no captures",
    )
    parser.add_argument("--deployments", type=Path, metavar="FILE", help="YAML or JSON: the deployments to have")
    parser.add_argument(
        "--follow-interval",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how often to ask which versions followed aliases name",
    )
    parser.add_argument(
        "--queue-capacity", type=positive_integer, default=256, help="requests that may wait for a slot"
    )
    parser.add_argument(
        "--stream-capacity", type=positive_integer, default=64, help="events that may wait for a slow client"
    )
    return parser


def _read_endpoint(parser: argparse.ArgumentParser, options: argparse.Namespace) -> CompilerEndpoint:
    has_certificate, has_key = options.compiler_certificate is not None, options.compiler_key is not None
    if has_certificate != has_key or (has_certificate and options.compiler_ca is None):
        parser.error("--compiler-certificate and --compiler-key belong together, and need --compiler-ca")
    return CompilerEndpoint(
        options.compiler,
        ca_path=options.compiler_ca,
        certificate_path=options.compiler_certificate,
        key_path=options.compiler_key,
        allow_insecure=options.allow_insecure,
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds
