"""The service's settings: the only reader of the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.config import EdgeConfig
from edge.options import add_server_options, positive_integer, read_edge_config


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one runtime.

    Attributes:
        edge: Address, limits, TLS.
        compiler: `host:port` of the BundleService.
        store: The BundleService's own layout, where it is on this host; None fetches every blob.
        cache: Directory of fetched blobs and of what has been verified.
        verify_always: Hash every blob at every load, whatever has been verified before.
        num_cores: Logical cores that deployments are placed on.
        threads_per_core: Threads that a rank computes with on its core.
        queue_capacity: Requests of one deployment that may wait for a slot.
        stream_capacity: Events that may wait for a slow client before its sequence is paused.
        log_level: Least severe level that is logged.
    """

    edge: EdgeConfig
    compiler: str
    store: Path | None
    cache: Path
    verify_always: bool
    num_cores: int
    threads_per_core: int
    queue_capacity: int
    stream_capacity: int
    log_level: str


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Reads the command line; exits with a message where it is wrong."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    return Settings(
        edge=read_edge_config(parser, options),
        compiler=options.compiler,
        store=options.bundle_store.absolute() if options.bundle_store is not None else None,
        cache=options.cache.absolute(),
        verify_always=options.verify == "always",
        num_cores=options.cores,
        threads_per_core=options.threads_per_core,
        queue_capacity=options.queue_capacity,
        stream_capacity=options.stream_capacity,
        log_level=options.log_level,
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime_svc", description="Serves Kiln's runtime.")
    add_server_options(parser)
    parser.add_argument("--compiler", required=True, help="host:port of the BundleService")
    parser.add_argument("--bundle-store", type=Path, help="the BundleService's own layout, where it is on this host")
    parser.add_argument("--cache", required=True, type=Path, help="directory for fetched blobs")
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
        "--queue-capacity", type=positive_integer, default=256, help="requests that may wait for a slot"
    )
    parser.add_argument(
        "--stream-capacity", type=positive_integer, default=64, help="events that may wait for a slow client"
    )
    return parser
