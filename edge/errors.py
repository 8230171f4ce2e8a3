"""Errors of a server's own configuration and start; they end the process and cross no wire.

EdgeError
├── AddressInvalid            text that is no host:port
├── PlaintextRefused          plaintext on an address that others can reach
├── AddressUnavailable        a port that is taken, or a host that is not of this machine
└── TlsFileInvalid            a certificate or key that cannot be read
"""

from __future__ import annotations

from bundle.errors import FieldViolation, KilnError


class EdgeError(KilnError):
    """Root of the edge's own errors."""

    reason = "SERVER_CONFIG_INVALID"


class AddressInvalid(EdgeError):
    """Text that is no host:port."""

    reason = "ADDRESS_INVALID"

    def __init__(self, address: str) -> None:
        violation = FieldViolation("address", repr(address), "HOST:PORT or [IPV6]:PORT with a port from 0 to 65535")
        super().__init__(str(violation), violations=(violation,), address=address)


class PlaintextRefused(EdgeError):
    """Plaintext on an address that others can reach."""

    reason = "PLAINTEXT_REFUSED"

    def __init__(self, address: str) -> None:
        accepted = "a loopback address, a TLS configuration, or permission to serve in plaintext"
        violation = FieldViolation("address", repr(address), accepted)
        super().__init__(f"plaintext beyond this host: {violation}", violations=(violation,), address=address)


class AddressUnavailable(EdgeError):
    """A port that is taken, or a host that is not of this machine."""

    reason = "ADDRESS_UNAVAILABLE"

    def __init__(self, address: str) -> None:
        super().__init__(
            f"cannot listen on {address}: the port is taken, or the host is no address of this machine", address=address
        )


class TlsFileInvalid(EdgeError):
    """A certificate or key that cannot be read."""

    reason = "TLS_FILE_INVALID"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"TLS file {path}: {detail}", path=path, detail=detail)
