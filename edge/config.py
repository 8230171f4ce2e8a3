"""Address, limits and TLS of a server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from bundle.reading import reading
from edge.access.config import AccessConfig
from edge.access.errors import AnonymousRefused
from edge.access.principal import Principal
from edge.errors import AddressInvalid, PlaintextRefused, TlsFileInvalid

#: Connections at once, unless an option or the limit of open files says otherwise.
MAX_CONNECTIONS: Final = 4096

_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]/]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """The files for TLS, in PEM.

    Attributes:
        certificate_path: The server's certificate chain.
        key_path: Its private key.
        client_ca_path: Certificates of the authorities that clients' certificates must lead to; None asks clients for
            no certificate.
    """

    certificate_path: Path
    key_path: Path
    client_ca_path: Path | None = None

    def load(self) -> grpc.ServerCredentials:
        """Reads the files and makes the server's credentials of them.

        Raises:
            TlsFileInvalid: A file cannot be read, or holds no PEM.
        """
        client_ca = read_pem(self.client_ca_path) if self.client_ca_path is not None else None
        return grpc.ssl_server_credentials(
            [(read_pem(self.key_path), read_pem(self.certificate_path))],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )


@dataclass(frozen=True, slots=True)
class LocalListener:
    """A second address, for a program of this host that shows no token: all callers there are one principal.

    gRPC closes connections from other hosts to it. TLS and tokens are for `EdgeConfig.address`.

    Attributes:
        address: `host:port` on loopback; port 0 lets the system choose a free one.
        principal: Who calls there.
    """

    address: str
    principal: Principal


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """The configuration of one server.

    Attributes:
        address: `host:port`; port 0 lets the system choose a free one.
        max_message_bytes: Size of the largest message in either direction.
        keepalive_time_s: Idle time after which the server pings a connection.
        min_ping_interval_s: Shortest interval of pings that clients may send without data.
        drain_timeout_s: How long running calls may take to finish once the server drains.
        max_connection_age_s: Age at which the server asks a client to connect anew, give or take a tenth; calls that
            run on the old connection finish. Behind a balancer of connections, clients so find new replicas.
        max_connection_age_grace_s: How long calls may go on then; None lets them finish.
        handshake_timeout_s: Time in which a new connection must speak TLS, if the server does, and HTTP/2.
        max_connection_idle_s: Time after which the server closes a connection without a call.
        max_connections: Connections at once; the server closes every further one as soon as it has accepted it.
        max_streams_per_connection: Calls of one connection at once; a client lets its further ones wait.
        max_calls_per_peer: Calls of one peer at once, over all its connections; further ones are refused.
        stall_timeout_s: How long a stream waits for a client that does not read; the call ends then.
        tls: Files for TLS; None serves in plaintext.
        allow_insecure: Whether the server may serve in plaintext on addresses other than loopback.
        access: How the server tells its clients apart.
        local_listener: The second address; None listens at `address` alone.
        reflection: Whether clients may ask for the API.
        metrics_address: `host:port` of the metrics; None serves none.
        trace_endpoint: URL that takes traces, OTLP over HTTP; None exports none.

    Raises:
        AddressInvalid: An address is not `host:port`.
        PlaintextRefused: An address is not loopback, `tls` is None and `allow_insecure` is False.
        AnonymousRefused: `address` is not loopback, `access` has no keys, `tls` no client CA, and `access` allows no
            anonymous clients.
    """

    address: str
    max_message_bytes: int = 16 << 20
    keepalive_time_s: float = 60.0
    min_ping_interval_s: float = 10.0
    drain_timeout_s: float = 30.0
    max_connection_age_s: float = 3600.0
    max_connection_age_grace_s: float | None = None
    handshake_timeout_s: float = 20.0
    max_connection_idle_s: float = 300.0
    max_connections: int = MAX_CONNECTIONS
    max_streams_per_connection: int = 2048
    max_calls_per_peer: int = 1024
    stall_timeout_s: float = 30.0
    tls: TlsConfig | None = None
    allow_insecure: bool = False
    access: AccessConfig = field(default_factory=AccessConfig)
    local_listener: LocalListener | None = None
    reflection: bool = True
    metrics_address: str | None = None
    trace_endpoint: str | None = None

    def __post_init__(self) -> None:
        local = None if self.local_listener is None else self.local_listener.address
        for address in (self.address, self.metrics_address, local):
            if address is None:
                continue
            match = _ADDRESS.fullmatch(address)
            if match is None or int(match["port"]) > 65535:
                raise AddressInvalid(address)
            if self.tls is None and not self.allow_insecure and not is_loopback(address):
                raise PlaintextRefused(address)
        if self.requires_principal and not self.can_authenticate:
            raise AnonymousRefused(self.address)

    @property
    def has_client_ca(self) -> bool:
        """Whether clients show certificates."""
        return self.tls is not None and self.tls.client_ca_path is not None

    @property
    def can_authenticate(self) -> bool:
        """Whether the server can find out who makes a call."""
        return self.access.jwks is not None or self.has_client_ca

    @property
    def requires_principal(self) -> bool:
        """Whether calls without a principal are refused."""
        return self.access.is_required or not (self.access.allow_anonymous or is_loopback(self.address))

    @property
    def host(self) -> str:
        """The host part of the address, without brackets."""
        return _host_of(self.address)

    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """Returns the configuration as gRPC core's channel arguments."""
        options = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", round(self.keepalive_time_s * 1000)),
            ("grpc.max_connection_age_ms", round(self.max_connection_age_s * 1000)),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_timeout_s * 1000)),
            ("grpc.max_connection_idle_ms", round(self.max_connection_idle_s * 1000)),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams_per_connection),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.min_ping_interval_s * 1000)),
            # Otherwise a second server on the port would silently take half of the first one's connections.
            ("grpc.so_reuseport", 0),
        ]
        # gRPC's default is no bound: a stream is never cut.
        if self.max_connection_age_grace_s is not None:
            options.append(("grpc.max_connection_age_grace_ms", round(self.max_connection_age_grace_s * 1000)))
        return tuple(options)


def is_loopback(address: str) -> bool:
    """Tells whether `address`, `host:port`, is a loopback address."""
    host = _host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_pem(path: Path) -> bytes:
    """Reads a file of certificates or keys.

    Raises:
        TlsFileInvalid: The file cannot be read, or holds no PEM.
    """
    with reading(partial(TlsFileInvalid, str(path))):
        data = path.read_bytes()
    if b"-----BEGIN " not in data:
        raise TlsFileInvalid(str(path), "it holds no PEM block")
    return data


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
