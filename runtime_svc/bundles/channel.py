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
    # The client notices a peer that is gone, also in the middle of a blob.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The client reconnects soon after a compiler comes back.
    ("grpc.max_reconnect_backoff_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class CompilerEndpoint:
    """The address of the compiler, and the files for TLS.

    Attributes:
        address: `host:port`.
        ca_path: Certificates that the compiler's certificate must lead to, PEM; None connects in plaintext.
        certificate_path: This runtime's certificate chain, PEM, if the compiler asks for one.
        key_path: Its private key, PEM.
        allow_insecure: Whether to connect in plaintext to addresses other than loopback.

    Raises:
        PlaintextRefused: `address` is not loopback, `ca_path` is None and `allow_insecure` is False.
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
        """Opens a channel, which connects at the first call.

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
