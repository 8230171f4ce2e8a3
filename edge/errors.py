"""Errors that the edge itself raises.

EdgeError
├── AddressInvalid            text that is not host:port
├── PlaintextRefused          plaintext on an address that others can reach
├── AddressUnavailable        a taken port, or a host of another machine
├── TlsFileInvalid            a certificate or key that cannot be read
├── OptionsInvalid            options that are missing, unknown, repeated or contradictory, or have invalid values
├── LogFileInvalid            a log file that cannot be written
├── TracingUnavailable        an endpoint for traces without the extra that exports them
├── RequestMalformed          bytes that do not parse as the method's request
├── ClientStalled             a stream whose client has not read for too long
├── TooManyCalls              a call of a client that has as many as it may
├── RequestTooLarge           a request that is larger than any that the server takes now
└── ShuttingDown              a new call while the server drains

A starting server raises the first seven; clients never see them.
"""

from __future__ import annotations

from collections.abc import Iterable

from bundle.errors import FieldViolation, KilnError


class EdgeError(KilnError):
    """Root of the edge's own errors."""

    reason = "EDGE_ERROR"


class AddressInvalid(EdgeError):
    """Text that is not host:port."""

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
    """A port that is taken, or a host that belongs to another machine."""

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


class OptionsInvalid(EdgeError):
    """Options that are missing, unknown, repeated or contradictory, or have invalid values."""

    reason = "OPTIONS_INVALID"

    def __init__(self, violations: Iterable[FieldViolation]) -> None:
        found = tuple(violations)
        super().__init__("; ".join(map(str, found)), violations=found)


class LogFileInvalid(EdgeError):
    """A log file that cannot be written."""

    reason = "LOG_FILE_INVALID"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"log file {path}: {detail}", path=path, detail=detail)


class TracingUnavailable(EdgeError):
    """An endpoint for traces without the extra that exports them."""

    reason = "TRACING_UNAVAILABLE"

    def __init__(self, module: str) -> None:
        super().__init__(
            f"traces need the extra `tracing`, such as in `pip install 'kiln-runtime[tracing]'`: no module {module}",
            module=module,
        )


class RequestMalformed(EdgeError):
    """Bytes that do not parse as a message of the method's request type."""

    reason = "REQUEST_MALFORMED"

    def __init__(self) -> None:
        super().__init__("the request is no message of the type that this method takes")


class ClientStalled(EdgeError):
    """A stream whose client has not read for too long."""

    reason = "CLIENT_STALLED"

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"the client has kept its stream waiting for {waited_s:.3g} s", waited_s=waited_s)


class TooManyCalls(EdgeError):
    """A call of a client that has as many running as it may."""

    reason = "TOO_MANY_CALLS"

    def __init__(self, client: str, limit: int) -> None:
        super().__init__(
            f"{client} has {limit} calls running, as many as one client may",
            client=client,
            limit=limit,
            retry_after_s=1.0,
        )


class RequestTooLarge(EdgeError):
    """A request that is larger than any that the server takes now."""

    reason = "REQUEST_TOO_LARGE"

    def __init__(self, size: int, limit: int, unit: str) -> None:
        violation = FieldViolation("request", f"{size} {unit}", f"at most {limit} {unit}")
        super().__init__(
            f"the request is too large: {violation}", violations=(violation,), size=size, limit=limit, unit=unit
        )


class ShuttingDown(EdgeError):
    """A new call while the server drains."""

    reason = "SHUTTING_DOWN"

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new calls", retry_after_s=1.0)
