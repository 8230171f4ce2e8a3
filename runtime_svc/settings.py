"""The service's settings: the only reader of the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.config import EdgeConfig, TlsConfig
from edge.logs import LEVELS


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
    options = _build_parser().parse_args(arguments)
    tls = None
    if options.tls_certificate is not None or options.tls_key is not None:
        tls = TlsConfig(options.tls_certificate, options.tls_key, options.tls_client_ca)
    return Settings(
        edge=EdgeConfig(
            options.address, tls=tls, allow_insecure=options.allow_insecure, drain_timeout_s=options.drain_timeout
        ),
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
    parser.add_argument("--address", required=True, help="host:port to listen on; port 0 takes a free one")
    parser.add_argument("--compiler", required=True, help="host:port of the BundleService")
    parser.add_argument("--bundle-store", type=Path, help="the BundleService's own layout, where it is on this host")
    parser.add_argument("--cache", required=True, type=Path, help="directory for fetched blobs")
    parser.add_argument(
        "--verify", choices=("cached", "always"), default="cached", help="hash blobs once, or at every load"
    )
    parser.add_argument("--cores", type=_positive, default=os.cpu_count() or 1, help="logical cores, one for each rank")
    parser.add_argument("--threads-per-core", type=_positive, default=1, help="threads that a rank computes with")
    parser.add_argument("--queue-capacity", type=_positive, default=256, help="requests that may wait for a slot")
    parser.add_argument("--stream-capacity", type=_positive, default=64, help="events that may wait for a slow client")
    parser.add_argument("--tls-certificate", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="private key, PEM")
    parser.add_argument("--tls-client-ca", type=Path, help="certificates that clients' ones must lead to, PEM")
    parser.add_argument("--allow-insecure", action="store_true", help="serve in plaintext beyond loopback")
    parser.add_argument("--drain-timeout", type=float, default=10.0, help="seconds for running streams at the end")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
