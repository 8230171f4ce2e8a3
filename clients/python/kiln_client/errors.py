"""Errors of the client: those of the services, by their codes, and those that the client itself raises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status


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
        metadata: Mapping[str, object] | None = None,
        fields: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.reason = reason or self.code
        self.message = message
        self.metadata = {name: str(value) for name, value in (metadata or {}).items()}
        self.fields = tuple(fields)
        self.retry_after_s = retry_after_s

    @classmethod
    def about(cls, field: str, description: str, message: str, *, reason: str, **metadata: object) -> Self:
        """Makes the error of one mistake."""
        return cls(message, reason=reason, fields=[FieldViolation(field, description, reason)], metadata=metadata)

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
        message = f"{source} cannot be read: {detail}"
        super().__init__(message, reason=reason, fields=[violation], metadata={"source": source})


class OverrideInvalid(InvalidArgument):
    """An override of a configuration that says nothing, or leads nowhere."""

    def __init__(self, text: str, detail: str) -> None:
        violation = FieldViolation("override", detail, "CONFIG_INVALID")
        message = f"the override {text!r} cannot be applied: {detail}"
        super().__init__(message, reason="CONFIG_INVALID", fields=(violation,), metadata={"override": text})


class FeatureNotServed(InvalidArgument, ValueError):
    """A call asks for what no server does; each field says what to ask for instead."""

    def __init__(self, fields: Sequence[FieldViolation]) -> None:
        names = ", ".join(violation.field for violation in fields)
        super().__init__(f"{names}: not served", reason="FEATURE_NOT_SERVED", fields=fields)


class NotFound(KilnError):
    """What the request names does not exist."""

    default_code = "NOT_FOUND"


class ModelNotFound(NotFound):
    """`kiln run` or `kiln serve` was given a model that is nowhere."""

    def __init__(self, model: str, accepted: str) -> None:
        violation = FieldViolation("model", f"got {model!r}; accepted: {accepted}", "MODEL_NOT_FOUND")
        message = f"there is no model {model!r}"
        super().__init__(message, reason="MODEL_NOT_FOUND", fields=(violation,), metadata={"model": model})


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


class HomeMissing(FailedPrecondition):
    """A user without a home directory has named no home either."""

    def __init__(self) -> None:
        message = "this user has no home directory: give --home, or set KILN_HOME, XDG_DATA_HOME or HOME"
        super().__init__(message, reason="HOME_MISSING")


class HomeUnreadable(FailedPrecondition):
    """The client cannot read where the services of a home listen."""

    def __init__(self, path: object, detail: str) -> None:
        message = (
            f"{path}, which says where the services of a home listen, cannot be read: {detail}; give the address"
            " (--compiler, --runtime), or another home (KILN_HOME)"
        )
        super().__init__(message, reason="HOME_UNREADABLE", metadata={"path": path, "detail": detail})


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


class Unavailable(KilnError):
    """The server cannot be reached or cannot answer now."""

    default_code = "UNAVAILABLE"


class HubFailed(Unavailable):
    """The Hub does not give a model: it does not exist, the user may not read it, or the Hub cannot be reached."""

    def __init__(self, repo_id: str, detail: str) -> None:
        super().__init__(
            f"{repo_id} cannot be downloaded: {detail}", reason="HUB_FAILED", metadata={"repo_id": repo_id}
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


class TokenUnusable(FailedPrecondition):
    """A token, or the file of one, that the client cannot use. The message does not repeat the token."""

    def __init__(self, source: str, detail: str) -> None:
        message = f"the token of {source} cannot be used: {detail}"
        super().__init__(message, reason="TOKEN_UNUSABLE", metadata={"source": source, "detail": detail})


# Causes of failed connections by what gRPC's core says about them. TlsOptions are the SDK's form of --tls and its kin.
_CONNECTION_CAUSES = {
    "WRONG_VERSION_NUMBER": "the server speaks plaintext, and TLS was asked for: leave out --tls and TlsOptions",
    "CERTIFICATE_VERIFY_FAILED": "no trusted authority has issued the server's certificate: --tls-ca names one",
    "Hostname Verification Check failed": "the server's certificate is for other hosts than the address's",
    "failed to connect to all addresses; last error: UNAVAILABLE: .*Socket closed": (
        "the server closed it at once, as one does that speaks TLS: if this one does, use --tls, --tls-ca or TlsOptions"
    ),
    "Connection refused": "nothing listens there; `kiln up` and `kiln run` start both services",
    "Domain name not found": "the host has no address",
}

#: By code.
_CLASSES = {one.default_code: one for one in KilnError.__subclasses__()} | {"UNKNOWN": Internal}


def error_from_rpc(error: grpc.aio.AioRpcError, address: str, note: str = "") -> KilnError:
    """Converts the error of a call of a server; `note` says after its address where that comes from."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # a proxy has rewritten the code or the message: use the plain status
        status = None
    if status is not None:
        return error_from_status(status)
    code, details = error.code().name, error.details() or "no details"
    if code == "UNAVAILABLE":
        causes = (cause for pattern, cause in _CONNECTION_CAUSES.items() if re.search(pattern, details))
        return Unavailable(
            f"connection to {address}{note} failed: {next(causes, details)}",
            reason="CONNECTION_FAILED",
            metadata={"address": address, "detail": details},
        )
    return _CLASSES.get(code, KilnError)(details, code=code, metadata={"address": address})


def error_from_status(status: status_pb2.Status) -> KilnError:
    """Converts a google.rpc.Status with its details to a KilnError."""
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    info, request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    found = {
        message.DESCRIPTOR.name
        for detail in status.details
        for message in (info, request, retry)
        if detail.Unpack(message)
    }
    return _CLASSES.get(code, KilnError)(
        status.message,
        code=code,
        reason=info.reason,
        metadata=info.metadata,
        fields=[
            FieldViolation(violation.field, violation.description, violation.reason)
            for violation in request.field_violations
        ],
        retry_after_s=retry.retry_delay.ToTimedelta().total_seconds() if "RetryInfo" in found else None,
    )
