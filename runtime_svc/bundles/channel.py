"""The connection to the compiler's BundleService."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from edge.config import is_loopback, read_pem
from edge.errors import PlaintextRefused

_OPTIONS: Final = (
    # A manifest with thousands of tensors is larger than gRPC's default limit.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 1 << 20),
    # A peer that is gone is noticed, in the middle of a blob too.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A compiler that comes back is found again soon.
    ("grpc.max_reconnect_backoff_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class CompilerEndpoint:
    """Where the compiler is, and how to speak to it.

    Attributes:
        address: `host:port`.
        ca_path: Certificates that the compiler's certificate must lead to, PEM; None speaks plaintext.
        certificate_path: This runtime's certificate chain, PEM, for a compiler that asks for one.
        key_path: Its private key, PEM.
        allow_insecure: Allows plaintext to addresses other than loopback.

    Raises:
        PlaintextRefused: It is no loopback address, and there is neither a CA nor permission.
    """

    address: str
    ca_path: Path | None = None
    certificate_path: Path | None = None
    key_path: Path | None = None
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        is_local = self.address.startswith("unix:") or is_loopback(self.address)
        if self.ca_path is None and not self.allow_insecure and not is_local:
            raise PlaintextRefused(self.address)

    def connect(self) -> grpc.aio.Channel:
        """A channel, which connects when it is first used.

        Raises:
            TlsFileInvalid: A certificate or key cannot be read.
        """
        if self.ca_path is None:
            return grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=read_pem(self.ca_path),
            private_key=None if self.key_path is None else read_pem(self.key_path),
            certificate_chain=None if self.certificate_path is None else read_pem(self.certificate_path),
        )
        return grpc.aio.secure_channel(self.address, credentials, options=_OPTIONS)
