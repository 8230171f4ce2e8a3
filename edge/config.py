"""Address, limits and TLS of a server."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from bundle.errors import FieldViolation
from bundle.host.reading import reading
from edge.access.config import AccessConfig
from edge.access.errors import AnonymousRefused
from edge.access.principal import Principal
from edge.errors import AddressInvalid, OptionsInvalid, PlaintextRefused, TlsFileInvalid
from edge.loopback import host_of, is_loopback
from edge.options import ADDRESS, COUNT, FLAG, PATH, SECONDS, TEXT, option, option_class, section

#: Connections at once, unless an option or the limit of open files says otherwise.
MAX_CONNECTIONS: Final = 4096

_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]/]+):(?P<port>[0-9]{1,5})")


@option_class(slots=True)
class TlsConfig:
    """The files for TLS, in PEM. Without `client_ca_path`, the server asks clients for no certificate."""

    certificate_path: Path = option(PATH, "certificate chain, PEM", name="tls-certificate", is_required=False)
    key_path: Path = option(PATH, "private key, PEM", name="tls-key", is_required=False)
    client_ca_path: Path | None = option(
        PATH, "certificates that clients' ones must lead to, PEM", name="tls-client-ca", default=None
    )

    @classmethod
    def from_options(cls, client_ca_path: Path | None, **files: Path) -> TlsConfig | None:
        """Takes the files of the options; None if there are none."""
        if len(files) == 2:
            return cls(client_ca_path=client_ca_path, **files)
        if not files and client_ca_path is None:
            return None
        violation = FieldViolation(
            "tls-certificate, tls-key, tls-client-ca", "some of them", "the first two together; the third with these"
        )
        raise OptionsInvalid([violation])

    def load(self) -> grpc.ServerCredentials:
        """Reads the files and makes the server's credentials of them."""
        client_ca = read_pem(self.client_ca_path) if self.client_ca_path is not None else None
        return grpc.ssl_server_credentials(
            [(read_pem(self.key_path), read_pem(self.certificate_path))],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )


@dataclass(frozen=True, slots=True)
class LocalListener:
    """A second address, for a program of this host that shows no token: all callers there are one principal.

    It is on loopback; port 0 lets the system choose a free one. gRPC closes connections from other hosts to it. TLS and
    tokens are for `EdgeConfig.address`.
    """

    address: str
    principal: Principal


@option_class(slots=True)
class EdgeConfig:
    """The configuration of one server: its options, and what only our own code sets.

    Attributes:
        side_addresses: Further addresses, which have fewer services. They take the calls that `local_listener` takes if
            there is one, or else those that `address` takes.
        max_message_bytes: Size of the largest message in either direction.
        keepalive_time_s: Idle time after which the server pings a connection.
        min_ping_interval_s: Shortest interval of pings that clients may send without data.
        handshake_timeout_s: Time in which a new connection must speak TLS, if the server does, and HTTP/2.
    """

    address: str = option(ADDRESS, "where to listen; port 0 takes a free one")
    tls: TlsConfig | None = section(TlsConfig, default=None)
    allow_insecure: bool = option(FLAG, "serve in plaintext beyond loopback", default=False)
    access: AccessConfig = section(AccessConfig, default_factory=AccessConfig)
    reflection: bool = option(FLAG, "tell clients about the API (gRPC reflection)", default=True)
    drain_timeout_s: float = option(SECONDS, "time for running calls at the end", default=10.0)
    # gRPC adds or takes up to a tenth. Clients behind a balancer of connections find new replicas that way.
    max_connection_age_s: float = option(
        SECONDS, "time after which clients are asked to connect anew; running calls finish", default=3600.0
    )
    max_connection_age_grace_s: float | None = option(
        SECONDS,
        "time that running calls may take then; they are cut after it",
        default=None,
        default_text="as long as they take",
    )
    max_connection_idle_s: float = option(
        SECONDS, "time after which a connection without a call is closed", default=300.0
    )
    max_connections: int = option(
        COUNT,
        "connections at once; further ones are closed at once",
        default=MAX_CONNECTIONS,
        derive=lambda _: choose_max_connections(),
        default_text=f"half of the files that the process may open, at most {MAX_CONNECTIONS}",
    )
    max_streams_per_connection: int = option(COUNT, "calls of one connection at once; further ones wait", default=2048)
    max_calls_per_peer: int = option(
        COUNT, "calls of one client address at once, probes apart; further ones are refused", default=1024
    )
    stall_timeout_s: float = option(
        SECONDS, "time after which a stream whose client does not read is ended", default=30.0
    )
    metrics_address: str | None = option(
        ADDRESS, "where to serve metrics for Prometheus, over HTTP", default=None, default_text="nowhere"
    )
    trace_endpoint: str | None = option(
        TEXT,
        "URL that takes traces, OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces",
        default=None,
        default_text="no traces",
    )
    local_listener: LocalListener | None = None
    side_addresses: tuple[str, ...] = ()
    max_message_bytes: int = 16 << 20
    keepalive_time_s: float = 60.0
    min_ping_interval_s: float = 10.0
    handshake_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        violations = []
        if self.access.identities is not None and not self.has_client_ca:
            violations.append(FieldViolation("auth-identities", "no tls-client-ca beside it", "both, or neither"))
        if self.access.is_required and not self.can_authenticate:
            accepted = "false without auth-jwks or tls-client-ca, which name principals"
            violations.append(FieldViolation("require-auth", "true", accepted))
        if violations:
            raise OptionsInvalid(violations)
        local = None if self.local_listener is None else self.local_listener.address
        for address in (self.address, self.metrics_address, local, *self.side_addresses):
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
        return host_of(self.address)

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


def choose_max_connections() -> int:
    """Chooses the number of connections if no option sets it, so that files and processes never lack descriptors."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft_limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft_limit // 2))


def read_pem(path: Path) -> bytes:
    """Reads a file of certificates or keys."""
    with reading(partial(TlsFileInvalid, str(path))):
        data = path.read_bytes()
    if b"-----BEGIN " not in data:
        raise TlsFileInvalid(str(path), "it holds no PEM block")
    return data
