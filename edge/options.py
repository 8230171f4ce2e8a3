"""The command-line options that all our servers share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Final

from edge.config import EdgeConfig, TlsConfig
from edge.logs import LEVELS

_SIZE: Final = re.compile(r"([1-9][0-9]{0,15})(|KiB|MiB|GiB|TiB)")
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the address, TLS, drain and log options."""
    parser.add_argument("--address", required=True, help="host:port to listen on; port 0 takes a free one")
    parser.add_argument("--tls-certificate", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="private key, PEM")
    parser.add_argument("--tls-client-ca", type=Path, help="certificates that clients' ones must lead to, PEM")
    parser.add_argument("--allow-insecure", action="store_true", help="serve in plaintext beyond loopback")
    parser.add_argument("--drain-timeout", type=float, default=10.0, help="seconds for running calls at the end")
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="least severe level that is logged")


def read_edge_config(parser: argparse.ArgumentParser, options: argparse.Namespace) -> EdgeConfig:
    """Makes the server's configuration from the options of `add_server_options`; exits if they contradict each other.

    Raises:
        AddressInvalid, PlaintextRefused: See `EdgeConfig`.
    """
    tls = None
    if options.tls_certificate is not None and options.tls_key is not None:
        tls = TlsConfig(options.tls_certificate, options.tls_key, options.tls_client_ca)
    elif options.tls_certificate or options.tls_key or options.tls_client_ca:
        parser.error("--tls-certificate and --tls-key belong together; --tls-client-ca needs both")
    return EdgeConfig(
        options.address, tls=tls, allow_insecure=options.allow_insecure, drain_timeout_s=options.drain_timeout
    )


def positive_integer(text: str) -> int:
    """Parses an option's integer of at least 1; for `type=`.

    Raises:
        ArgumentTypeError: The integer is less than 1.
        ValueError: The text is no integer.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def byte_size(text: str) -> int:
    """Parses an option's size, such as `8GiB` or `8589934592`, to bytes; for `type=`.

    Raises:
        ArgumentTypeError: The text is no size, or the size is 0.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; accepted: bytes, or a number with KiB, MiB, GiB, TiB")
    return int(match[1]) * _UNITS[match[2]]
