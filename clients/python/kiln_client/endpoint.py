"""How to connect to a server: addresses, TLS, deadlines, retries."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from kiln_client.errors import InvalidArgument

DEFAULT_ADDRESSES = {"KILN_COMPILER": "127.0.0.1:50051", "KILN_RUNTIME": "127.0.0.1:50052"}
"""Address of a server if neither an argument nor this environment variable gives one, by the variable's name."""

# What gRPC resolves; any other scheme, such as that of a URL, it takes for part of a host's name.
_GRPC_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
_ADDRESS = re.compile(r"(?:unix:.+|(?:[a-z0-9+.-]+:///?)?(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):[0-9]{1,5})")
# Addresses whose host is named: those of the other schemes lead wherever their resolver says.
_HOST = re.compile(r"(?:(?:dns|ipv4|ipv6):///?)?\[?(?P<host>[^\s/\[\]]+?)\]?:[0-9]{1,5}")

# Unary calls that only read, so that it is safe to retry them.
_READS = {
    "google.longrunning.Operations": ("GetOperation", "ListOperations"),
    "kiln.bundle.v1.BundleService": ("GetBundle", "ListBundles", "ListAliases", "ListLeases"),
    "kiln.runtime.v1.GenerationService": ("Tokenize", "Detokenize"),
    "kiln.runtime.v1.RuntimeService": ("ListDeployments", "GetDeployment", "GetServerInfo"),
}

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": service, "method": method} for service, methods in _READS.items() for method in methods
                ],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

_CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.max_receive_message_length", 64 << 20),  # a manifest with thousands of tensors
    ("grpc.max_reconnect_backoff_ms", 5_000),  # the default, two minutes, outlasts a restart by far
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files by which client and server authenticate each other.

    Attributes:
        ca_path: PEM file of the authorities to trust; None trusts those that gRPC ships.
        certificate_path: PEM file of the client's certificate chain, for mutual TLS.
        key_path: PEM file of the client's private key, for mutual TLS.
        server_name: Name that the server's certificate must carry; None takes the address's host.
    """

    ca_path: Path | None = None
    certificate_path: Path | None = None
    key_path: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Default deadlines of calls, in seconds.

    Attributes:
        read_s: For calls that only read.
        change_s: For calls that change state and may wait for running requests.
        load_s: For loading a bundle or weights, or importing a bundle.
        reconnect_s: How long the compiler may stay unreachable while a client waits for an operation; 0 gives up at
            once.
    """

    read_s: float = 30.0
    change_s: float = 600.0
    generate_s: float = 3600.0
    load_s: float = 3600.0
    compile_s: float = 86400.0
    reconnect_s: float = 600.0


def resolve_address(address: str | None, variable: str) -> str:
    """Returns the address to connect to: the argument, the environment variable or the default, in this order."""
    resolved = address or os.environ.get(variable) or DEFAULT_ADDRESSES[variable]
    scheme, separator, place = resolved.partition("://")
    accepted = "HOST:PORT"
    if separator and scheme not in _GRPC_SCHEMES:
        bare = place.partition("/")[0]
        example = f", such as {bare}" if _ADDRESS.fullmatch(bare) else ""
        tls = ", and --tls or --tls-ca for TLS (TlsOptions in the SDK)" if scheme.endswith("s") else ""
        accepted = f"HOST:PORT without {scheme}://{example}{tls}"
    elif _ADDRESS.fullmatch(resolved):
        return resolved
    description = f"got {resolved!r}; accepted: {accepted}"
    raise InvalidArgument.about("address", description, f"{resolved!r} is no server address", reason="ADDRESS_INVALID")


def is_local(address: str) -> bool:
    """Whether calls to an address stay on this host: it is a socket file or has a loopback host."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    match = _HOST.fullmatch(address)
    return match is not None and is_loopback(match["host"])


def is_loopback(host: str) -> bool:
    """Whether a host, whose IPv6 address has no brackets, is this one by its loopback address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def open_channel(address: str, tls: TlsOptions | None) -> grpc.aio.Channel:
    """Opens a channel on the running event loop. The first call connects it."""
    options = list(_CHANNEL_OPTIONS)
    # No proxy of the environment is for calls that stay on this host. For others, gRPC obeys `no_proxy`, but for `*`.
    if is_local(address) or os.environ.get("no_proxy", "").strip() == "*":
        options.append(("grpc.enable_http_proxy", 0))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        _read(tls.ca_path), private_key=_read(tls.key_path), certificate_chain=_read(tls.certificate_path)
    )
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
