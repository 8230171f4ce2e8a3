"""Errors that the edge itself raises. Those without a code end a process that starts."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation, KilnError


class EdgeError(KilnError):
    """Root of the edge's own errors."""


class AddressInvalid(EdgeError):
    """Text that is not host:port."""

    violation = FieldViolation("address", "{address!r}", "HOST:PORT or [IPV6]:PORT with a port from 0 to 65535")
    address: str


class PlaintextRefused(EdgeError):
    """Plaintext on an address that others can reach."""

    message = "plaintext beyond this host: {violation}"
    violation = FieldViolation(
        "address", "{address!r}", "a loopback address, a TLS configuration, or permission to serve in plaintext"
    )
    address: str


class AddressUnavailable(EdgeError):
    """A port that is taken, or a host that belongs to another machine."""

    message = "cannot listen on {address}: the port is taken, or the host is no address of this machine"
    address: str


class TlsFileInvalid(EdgeError):
    """A certificate or key that cannot be read."""

    message = "TLS file {path}: {detail}"
    path: str
    detail: str


class OptionsInvalid(EdgeError):
    """Options that are missing, unknown, repeated or contradictory, or have invalid values."""

    message = "{violations}"
    violations: Sequence[FieldViolation]


class LogFileInvalid(EdgeError):
    """A log file that cannot be written."""

    message = "log file {path}: {detail}"
    path: str
    detail: str


class TracingUnavailable(EdgeError):
    """An endpoint for traces without the extra that exports them."""

    message = "traces need the extra `tracing`, such as in `pip install 'kiln-runtime[tracing]'`: no module {module}"
    module: str


class RequestMalformed(EdgeError, code="INVALID_ARGUMENT"):
    """Bytes that do not parse as a message of the method's request type."""

    message = "the request is no message of the type that this method takes"


class ClientStalled(EdgeError, code="ABORTED"):
    """A stream whose client has not read for too long."""

    message = "the client has kept its stream waiting for {waited_s:.3g} s"
    waited_s: float


class TooManyCalls(EdgeError, code="RESOURCE_EXHAUSTED"):
    """A call of a client that has as many running as it may."""

    message = "{client} has {limit} calls running, as many as one client may"
    retry_after_s = 1.0
    client: str
    limit: int


class RequestTooLarge(EdgeError, code="INVALID_ARGUMENT"):
    """A request that is larger than any that the server takes now."""

    message = "the request is too large: {violation}"
    violation = FieldViolation("request", "{size} {unit}", "at most {limit} {unit}")
    size: int
    limit: int
    unit: str


class ShuttingDown(EdgeError, code="UNAVAILABLE"):
    """A new call while the server drains."""

    message = "the server is shutting down and takes no new calls"
    retry_after_s = 1.0
