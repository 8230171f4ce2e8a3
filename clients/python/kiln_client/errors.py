"""Errors of the client: those of the services, and those that the client itself raises.

KilnError                     root; also any status code without a class of its own
├── InvalidArgument           INVALID_ARGUMENT, with one FieldViolation per mistake
│   ├── DocumentInvalid       a YAML or JSON document that the client cannot read
│   └── OverrideInvalid       an override of a configuration that says nothing, or leads nowhere
├── NotFound                  NOT_FOUND
├── AlreadyExists             ALREADY_EXISTS
├── PermissionDenied          PERMISSION_DENIED
├── Unauthenticated           UNAUTHENTICATED
├── FailedPrecondition        FAILED_PRECONDITION
│   ├── ServiceNotInstalled   `kiln up` without the service's distribution
│   └── HomeInUse             `kiln up` on a home directory that another one serves
├── ResourceExhausted         RESOURCE_EXHAUSTED, usually with retry_after_s
├── Aborted                   ABORTED
├── Cancelled                 CANCELLED
│   └── ClientClosed          the client was closed while the call ran
├── DeadlineExceeded          DEADLINE_EXCEEDED
├── Unimplemented             UNIMPLEMENTED
│   └── WrongService          a server that is not the one the call is for
├── Unavailable               UNAVAILABLE, a lost or refused connection too
│   ├── ServiceExited         a service that `kiln up` started is gone
│   └── ServiceNotReady       a service that `kiln up` started did not become healthy in time
├── DataLoss                  DATA_LOSS
└── Internal                  INTERNAL and UNKNOWN
    └── StreamIncomplete      a stream that ended well without its result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One mistake in a request.

    Attributes:
        field: Path of the field, such as `neuron_config.seq_len`.
        description: The given value and the accepted ones.
        reason: UPPER_SNAKE identifier of the mistake; empty if the server gave none.
    """

    field: str
    description: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class KilnError(Exception):
    """Root of all errors of this package.

    Attributes:
        code: Canonical status code, such as `NOT_FOUND`.
        reason: UPPER_SNAKE identifier of the cause, such as `DEPLOYMENT_NOT_FOUND`; the code if there is none.
        message: One sentence for a person.
        metadata: Variables of the message by name.
        fields: Mistakes in the request; empty if the request is not at fault.
        retry_after_s: Seconds after which the server suggests to try again; None if it suggests nothing.
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: str = "",
        metadata: Mapping[str, str] | None = None,
        fields: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.reason = reason or self.code
        self.message = message
        self.metadata = dict(metadata or {})
        self.fields = tuple(fields)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        lines = [f"{self.code}/{self.reason}: {self.message}"]
        lines += [f"  {violation}" for violation in self.fields]
        return "\n".join(lines)


class InvalidArgument(KilnError):
    """The request is wrong whatever the state of the server."""

    default_code = "INVALID_ARGUMENT"


class DocumentInvalid(InvalidArgument):
    """A YAML or JSON document that the client cannot read."""

    def __init__(self, source: str, detail: str, *, reason: str, field: str) -> None:
        violation = FieldViolation(field, f"{detail}; accepted: a mapping or a list in YAML or JSON", reason)
        super().__init__(
            f"{source} cannot be read: {detail}", reason=reason, fields=(violation,), metadata={"source": source}
        )


class OverrideInvalid(InvalidArgument):
    """An override of a configuration that says nothing, or leads nowhere."""

    def __init__(self, text: str, detail: str) -> None:
        violation = FieldViolation("override", detail, "CONFIG_INVALID")
        message = f"the override {text!r} cannot be applied: {detail}"
        super().__init__(message, reason="CONFIG_INVALID", fields=(violation,), metadata={"override": text})


class NotFound(KilnError):
    """What the request names does not exist."""

    default_code = "NOT_FOUND"


class AlreadyExists(KilnError):
    """What the request would create exists."""

    default_code = "ALREADY_EXISTS"


class PermissionDenied(KilnError):
    """The caller may not do this."""

    default_code = "PERMISSION_DENIED"


class Unauthenticated(KilnError):
    """The server does not know who is calling."""

    default_code = "UNAUTHENTICATED"


class FailedPrecondition(KilnError):
    """The request is right, the state of the server is not."""

    default_code = "FAILED_PRECONDITION"


class ServiceNotInstalled(FailedPrecondition):
    """`kiln up` was asked to start a service whose distribution is not installed."""

    def __init__(self, service: str, distribution: str) -> None:
        super().__init__(
            f"the {service} service is not installed: install the distribution {distribution} beside kiln-client",
            reason="SERVICE_NOT_INSTALLED",
            metadata={"service": service, "distribution": distribution},
        )


class HomeInUse(FailedPrecondition):
    """`kiln up` was asked to serve a home directory that another `kiln up` serves."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            f"another `kiln up` serves {home}: stop it or choose another --home",
            reason="HOME_IN_USE",
            metadata={"home": str(home)},
        )


class ResourceExhausted(KilnError):
    """A queue, a core or memory is full."""

    default_code = "RESOURCE_EXHAUSTED"


class Aborted(KilnError):
    """A change by another client came first."""

    default_code = "ABORTED"


class Cancelled(KilnError):
    """The call was cancelled."""

    default_code = "CANCELLED"


class ClientClosed(Cancelled):
    """The client was closed while the call ran."""

    def __init__(self) -> None:
        super().__init__("the client was closed while the call ran", reason="CLIENT_CLOSED")


class DeadlineExceeded(KilnError):
    """The call's deadline passed."""

    default_code = "DEADLINE_EXCEEDED"


class Unimplemented(KilnError):
    """The server does not have this method."""

    default_code = "UNIMPLEMENTED"


class WrongService(Unimplemented):
    """A server that is not the one the call is for, such as the compiler at the address of the runtime."""

    def __init__(self, address: str, wanted: str, found: str) -> None:
        answers = f"the {found} answers at {address}" if found else f"{address} is no {wanted} of Kiln"
        super().__init__(
            f"{answers}, and the call is for the {wanted}: check --{wanted}, or KILN_{wanted.upper()}",
            reason="WRONG_SERVICE",
            metadata={"address": address, "wanted": wanted, "found": found},
        )


class Unavailable(KilnError):
    """The server cannot be reached or cannot answer now."""

    default_code = "UNAVAILABLE"


class ServiceExited(Unavailable):
    """A service that `kiln up` started is gone."""

    def __init__(self, service: str, returncode: int, log_path: Path, log_tail: str) -> None:
        how = f"exited with code {returncode}" if returncode >= 0 else f"was killed by signal {-returncode}"
        message = f"the {service} service {how}; its log is {log_path}"
        super().__init__(
            f"{message}\n{log_tail}" if log_tail else message,
            reason="SERVICE_EXITED",
            metadata={"service": service, "returncode": str(returncode), "log": str(log_path)},
        )


class ServiceNotReady(Unavailable):
    """A service that `kiln up` started did not become healthy in time."""

    def __init__(self, service: str, timeout_s: float, log_path: Path) -> None:
        super().__init__(
            f"the {service} service was not ready after {timeout_s:g} s; its log is {log_path}",
            reason="SERVICE_NOT_READY",
            metadata={"service": service, "timeout_s": f"{timeout_s:g}", "log": str(log_path)},
        )


class DataLoss(KilnError):
    """Stored bytes are corrupt."""

    default_code = "DATA_LOSS"


class Internal(KilnError):
    """A bug, here or in the server."""

    default_code = "INTERNAL"


class StreamIncomplete(Internal):
    """A stream that ended well without its result, or with a gap."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"the server's stream is incomplete: {detail}", reason="STREAM_INCOMPLETE")
