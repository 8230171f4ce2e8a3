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
    """Settings of one compiler.

    Attributes:
        edge: Address, limits, TLS.
        store: OCI layout that bundles are published in, with this compiler's other state beside the blobs.
        database_url: SQLAlchemy URL.
        model_roots: Directories that checkpoints may lie in.
        cache: Directory of the code generator's caches.
        max_builds: Builds that run at once.
        max_waiting: Compiles that may wait beside them.
        num_lowerings: Lowerings of one build that run at once.
        lowering_timeout_s: Of one lowering.
        log_level: Least severe level that is logged.
    """

    edge: EdgeConfig
    store: Path
    database_url: str
    model_roots: tuple[Path, ...]
    cache: Path
    max_builds: int
    max_waiting: int
    num_lowerings: int
    lowering_timeout_s: float
    log_level: str


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Reads the command line; exits with a message where it is wrong."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    tls = None
    if options.tls_certificate is not None and options.tls_key is not None:
        tls = TlsConfig(options.tls_certificate, options.tls_key, options.tls_client_ca)
    elif options.tls_certificate or options.tls_key or options.tls_client_ca:
        parser.error("--tls-certificate and --tls-key belong together; --tls-client-ca needs both")
    store: Path = options.store.absolute()
    return Settings(
        edge=EdgeConfig(
            options.address, tls=tls, allow_insecure=options.allow_insecure, drain_timeout_s=options.drain_timeout
        ),
        store=store,
        database_url=options.database or f"sqlite:///{store / 'kiln.db'}",
        model_roots=tuple(root.absolute() for root in options.model_root),
        cache=options.cache.absolute(),
        max_builds=options.max_builds,
        max_waiting=options.max_waiting,
        num_lowerings=options.lowerings,
        lowering_timeout_s=options.lowering_timeout,
        log_level=options.log_level,
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compiler_svc", description="Serves Kiln's compiler.")
    parser.add_argument("--address", required=True, help="host:port to listen on; port 0 takes a free one")
    parser.add_argument("--store", required=True, type=Path, help="OCI layout that bundles are published in")
    parser.add_argument("--database", help="SQLAlchemy URL; default: an SQLite file beside the store's blobs")
    parser.add_argument(
        "--model-root", required=True, type=Path, action="append", help="directory of checkpoints; may be repeated"
    )
    parser.add_argument("--cache", required=True, type=Path, help="directory for the code generator's caches")
    parser.add_argument("--max-builds", type=_positive, default=1, help="builds that run at once")
    parser.add_argument("--max-waiting", type=_positive, default=16, help="compiles that may wait beside them")
    parser.add_argument(
        "--lowerings", type=_positive, default=os.cpu_count() or 1, help="lowerings of one build that run at once"
    )
    parser.add_argument("--lowering-timeout", type=float, default=1800.0, help="seconds that one lowering may take")
    parser.add_argument("--tls-certificate", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="private key, PEM")
    parser.add_argument("--tls-client-ca", type=Path, help="certificates that clients' ones must lead to, PEM")
    parser.add_argument("--allow-insecure", action="store_true", help="serve in plaintext beyond loopback")
    parser.add_argument("--drain-timeout", type=float, default=10.0, help="seconds for running calls at the end")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
