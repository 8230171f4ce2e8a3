"""What stays on this host: calls to loopback addresses and socket files, which no proxy of the environment may read.

`kiln_client/endpoint.py` says the same for clients, which import only stubs.
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Final
from urllib.parse import urlsplit

_SOCKET_FILES: Final = ("unix:", "unix-abstract:")
#: What may stand before `host:port`. The other schemes of gRPC lead wherever their resolvers say.
_SCHEME: Final = re.compile(r"(?:dns|ipv4|ipv6):(?:///?)?")
_DIRECT: Final = (("grpc.enable_http_proxy", 0),)


def is_loopback(address: str) -> bool:
    """Tells whether `address`, `host:port`, is a loopback address."""
    return _is_loopback_host(host_of(address))


def is_local(target: str) -> bool:
    """Tells whether calls to a target of gRPC stay on this host: a socket file, or a loopback address."""
    return target.startswith(_SOCKET_FILES) or is_loopback(_SCHEME.sub("", target, count=1))


def is_local_url(url: str) -> bool:
    """Tells whether requests to a URL stay on this host."""
    return _is_loopback_host(urlsplit(url).hostname or "")


def channel_options(target: str) -> tuple[tuple[str, int], ...]:
    """Returns the options with which a channel leaves out the proxy where it must.

    gRPC obeys `no_proxy` for other addresses, but for `*`, with which all programs use no proxy.
    """
    return _DIRECT if is_local(target) or os.environ.get("no_proxy", "").strip() == "*" else ()


def host_of(address: str) -> str:
    """Returns the host of `host:port`, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def _is_loopback_host(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
