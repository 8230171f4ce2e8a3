"""Converts a gRPC status to a KilnError."""

from __future__ import annotations

import re
from collections.abc import Mapping

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kiln_client import errors

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

_CLASSES: Mapping[str, type[errors.KilnError]] = {
    error_class.default_code: error_class
    for error_class in (
        errors.InvalidArgument,
        errors.NotFound,
        errors.AlreadyExists,
        errors.PermissionDenied,
        errors.Unauthenticated,
        errors.FailedPrecondition,
        errors.ResourceExhausted,
        errors.Aborted,
        errors.Cancelled,
        errors.DeadlineExceeded,
        errors.Unimplemented,
        errors.Unavailable,
        errors.DataLoss,
        errors.Internal,
    )
} | {"UNKNOWN": errors.Internal}


def error_from_rpc(error: grpc.aio.AioRpcError, address: str, note: str = "") -> errors.KilnError:
    """Converts the error of a failed call to a KilnError.

    Args:
        error: The error that gRPC raised.
        address: Server that was called, for messages about the connection.
        note: Says after the address where that comes from.
    """
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # a proxy has rewritten the code or the message: use the plain status
        status = None
    if status is not None:
        return error_from_status(status)
    code, details = error.code().name, error.details() or "no details"
    if code == "UNAVAILABLE":
        causes = (cause for pattern, cause in _CONNECTION_CAUSES.items() if re.search(pattern, details))
        return errors.Unavailable(
            f"connection to {address}{note} failed: {next(causes, details)}",
            reason="CONNECTION_FAILED",
            metadata={"address": address, "detail": details},
        )
    return _CLASSES.get(code, errors.KilnError)(details, code=code, metadata={"address": address})


def error_from_status(status: status_pb2.Status) -> errors.KilnError:
    """Converts a google.rpc.Status with its details to a KilnError."""
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    info, request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    found = {
        message.DESCRIPTOR.name
        for detail in status.details
        for message in (info, request, retry)
        if detail.Unpack(message)
    }
    return _CLASSES.get(code, errors.KilnError)(
        status.message,
        code=code,
        reason=info.reason,
        metadata=info.metadata,
        fields=[
            errors.FieldViolation(violation.field, violation.description, violation.reason)
            for violation in request.field_violations
        ],
        retry_after_s=retry.retry_delay.ToTimedelta().total_seconds() if "RetryInfo" in found else None,
    )
