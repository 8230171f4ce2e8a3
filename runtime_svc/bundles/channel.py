"""The connection to the compiler's BundleService."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from edge.access.changing_file import ChangingFile
from edge.access.interceptor import TOKEN_KEY
from edge.config import is_loopback, read_pem
from edge.errors import PlaintextRefused
from runtime_svc.bundles.errors import CompilerTokenInvalid

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


_TOKEN: Final = re.compile(rb"[\w-]+(?:\.[\w-]+){2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CompilerEndpoint:
    """The address of the compiler, and the files for TLS.

    Attributes:
        address: `host:port`.
        ca_path: Certificates that the compiler's certificate must lead to, PEM; None connects in plaintext.
        certificate_path: This runtime's certificate chain, PEM, if the compiler asks for one.
        key_path: Its private key, PEM.
        token_path: File of the token that this runtime shows, read again when it has changed; None shows none.
        allow_insecure: Whether to connect in plaintext to addresses other than loopback, and show the token there.

    Raises:
        PlaintextRefused: `address` is not loopback, `ca_path` is None and `allow_insecure` is False.
    """

    address: str
    ca_path: Path | None = None
    certificate_path: Path | None = None
    key_path: Path | None = None
    token_path: Path | None = None
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


class CompilerToken:
    """The token that this runtime shows to the compiler."""

    def __init__(self, path: Path | None) -> None:
        """Reads nothing yet.

        Args:
            path: File of the token; None shows none.
        """
        self._file = None if path is None else ChangingFile(path, _parse_token, CompilerTokenInvalid)

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of the next call; empty without a token.

        Raises:
            CompilerTokenInvalid: The file cannot be read, or holds no token.
        """
        return () if self._file is None else ((TOKEN_KEY, f"Bearer {await self._file.read()}"),)


def _parse_token(data: bytes) -> str:
    token = data.strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError("it holds no JWT")
    return token.decode()
