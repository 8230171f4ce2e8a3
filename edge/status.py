"""Renders errors as `google.rpc.Status`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from bundle.errors import (
    AbiUnsupported,
    BlobCorrupt,
    BlobMissing,
    BlobNotFound,
    BundleError,
    BundleNotFound,
    DigestInvalid,
    KilnError,
    LayoutInvalid,
    ManifestInvalid,
    NeffInvalid,
    RefInvalid,
    ResourcesShort,
)
from edge.access.errors import Forbidden, KeysUnavailable, PrincipalBusy, Unauthenticated
from edge.errors import ClientStalled, RequestMalformed, RequestTooLarge, ShuttingDown, TooManyCalls

DOMAIN: Final = "kiln"
#: The reason of errors that clients are told nothing about.
INTERNAL_REASON: Final = "INTERNAL"
_INTERNAL_MESSAGE: Final = "internal error"

StatusTable = Mapping[type[KilnError], grpc.StatusCode]

#: Codes of the bundle package's errors; every service that reads bundles adds them to its table.
BUNDLE_STATUSES: Final[StatusTable] = MappingProxyType(
    {
        BundleError: grpc.StatusCode.INTERNAL,
        DigestInvalid: grpc.StatusCode.INVALID_ARGUMENT,
        RefInvalid: grpc.StatusCode.INVALID_ARGUMENT,
        BlobNotFound: grpc.StatusCode.NOT_FOUND,
        BlobMissing: grpc.StatusCode.DATA_LOSS,
        BundleNotFound: grpc.StatusCode.NOT_FOUND,
        BlobCorrupt: grpc.StatusCode.DATA_LOSS,
        LayoutInvalid: grpc.StatusCode.DATA_LOSS,
        ManifestInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        AbiUnsupported: grpc.StatusCode.FAILED_PRECONDITION,
        NeffInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        ResourcesShort: grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)

#: Codes of the edge's own errors; every server has them.
EDGE_STATUSES: Final[StatusTable] = MappingProxyType(
    {
        RequestMalformed: grpc.StatusCode.INVALID_ARGUMENT,
        ClientStalled: grpc.StatusCode.ABORTED,
        TooManyCalls: grpc.StatusCode.RESOURCE_EXHAUSTED,
        RequestTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
        ShuttingDown: grpc.StatusCode.UNAVAILABLE,
        Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        Forbidden: grpc.StatusCode.PERMISSION_DENIED,
        PrincipalBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
        KeysUnavailable: grpc.StatusCode.UNAVAILABLE,
    }
)

# gRPC peers refuse more than 8 KiB of metadata. The status travels in it twice: its message percent-encoded (up to
# three times as long), and all of it in base64.
MAX_MESSAGE_BYTES: Final = 768
MAX_VALUE_BYTES: Final = 256
MAX_STATUS_BYTES: Final = 3584


def status_from_error(error: Exception, table: StatusTable) -> status_pb2.Status:
    """Renders an error as a status.

    The code is that of the first class in the error's method resolution order that the table has. Details are ErrorInfo
    (domain, reason, metadata), RetryInfo if a retry may succeed, and BadRequest if fields are at fault. Texts that do
    not fit a gRPC trailer are shortened, and violations that do not fit are counted.

    Returns:
        The status; INTERNAL, without the error's text, if the table has no class of the error.
    """
    code = _find_code(error, table)
    if code is None or not isinstance(error, KilnError):
        return _build_status(grpc.StatusCode.INTERNAL, _INTERNAL_MESSAGE, [_build_error_info(INTERNAL_REASON, {})])
    details: list[Message] = [_build_error_info(error.reason, error.metadata)]
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = _build_status(code, _shorten(str(error), MAX_MESSAGE_BYTES), details)
    if error.violations:
        status.details.add().Pack(_build_bad_request(error, MAX_STATUS_BYTES - status.ByteSize()))
    return status


def message_for_log(error: Exception, table: StatusTable) -> str:
    """Returns the message of `status_from_error` without pieces of prompts."""
    if not isinstance(error, KilnError) or not is_mapped(error, table):
        return _INTERNAL_MESSAGE
    return _shorten(error.log_message, MAX_MESSAGE_BYTES)


def is_mapped(error: Exception, table: StatusTable) -> bool:
    """Tells whether the table has a class of the error."""
    return _find_code(error, table) is not None


def unmapped_errors(table: StatusTable, roots: Iterable[type[KilnError]]) -> list[type[KilnError]]:
    """Returns each class without a code, among `roots` and the imported classes that derive from them."""
    return [kind for root in roots for kind in _walk_classes(root) if not any(base in table for base in kind.__mro__)]


def _find_code(error: Exception, table: StatusTable) -> grpc.StatusCode | None:
    return next((table[kind] for kind in type(error).__mro__ if kind in table), None)


def _walk_classes(root: type[KilnError]) -> Iterator[type[KilnError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _walk_classes(kind)


def _build_status(code: grpc.StatusCode, message: str, details: Iterable[Message]) -> status_pb2.Status:
    number: int = code.value[0]  # grpc's enum has (number, name) values
    status = status_pb2.Status(code=number, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _build_error_info(reason: str, metadata: Mapping[str, str]) -> Message:
    short = {key: _shorten(value, MAX_VALUE_BYTES) for key, value in metadata.items()}
    info: Message = error_details_pb2.ErrorInfo(domain=DOMAIN, reason=reason, metadata=short)
    return info


def _build_bad_request(error: KilnError, limit_bytes: int) -> Message:
    request = error_details_pb2.BadRequest()
    for index, violation in enumerate(error.violations):
        added = request.field_violations.add(
            field=_shorten(violation.field, MAX_VALUE_BYTES),
            description=_shorten(f"got {violation.value}; accepted: {violation.accepted}", 2 * MAX_VALUE_BYTES),
            reason=error.reason,
        )
        if index > 0 and request.ByteSize() > limit_bytes:
            added.field, added.description = "", f"and {len(error.violations) - index} more violations"
            break
    message: Message = request
    return message


def _shorten(text: str, limit_bytes: int) -> str:
    """Shortens text to at most `limit_bytes` in UTF-8; an ellipsis stands for the missing part."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return data.decode()
    return data[: limit_bytes - 3].decode("utf-8", "ignore") + "…"
