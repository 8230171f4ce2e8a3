"""Renders errors as `google.rpc.Status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeGuard

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from bundle.errors import Code, KilnError

DOMAIN: Final = "kiln"
#: The reason of errors that clients are told nothing about.
INTERNAL_REASON: Final = "INTERNAL"
_INTERNAL_MESSAGE: Final = "internal error"

#: Codes that a service answers with in place of those that errors state, by the class of the error.
Codes = Mapping[type[KilnError], Code]
STATED: Final[Codes] = MappingProxyType({})

# gRPC peers refuse more than 8 KiB of metadata. The status travels in it twice: its message percent-encoded (up to
# three times as long), and all of it in base64.
MAX_MESSAGE_BYTES: Final = 768
MAX_VALUE_BYTES: Final = 256
MAX_STATUS_BYTES: Final = 3584


def find_code(error: type[KilnError], codes: Codes = STATED) -> Code | None:
    """Returns the code that a service with these `codes` answers with; None if no client is told the error."""
    return next((codes[base] for base in error.__mro__ if base in codes), error.code)


def status_from_error(error: Exception, codes: Codes = STATED) -> status_pb2.Status:
    """Renders an error as a status: INTERNAL, without the error's text, if no client is told it.

    Details are ErrorInfo (domain, reason, metadata), RetryInfo if a retry may succeed, and BadRequest if fields are at
    fault. Texts that do not fit a gRPC trailer are shortened, and violations that do not fit are counted.
    """
    if not isinstance(error, KilnError) or (code := find_code(type(error), codes)) is None:
        return _build_status("INTERNAL", _INTERNAL_MESSAGE, [_build_error_info(INTERNAL_REASON, {})])
    details: list[Message] = [_build_error_info(error.reason, error.metadata)]
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = _build_status(code, _shorten(str(error), MAX_MESSAGE_BYTES), details)
    if error.violations:
        status.details.add().Pack(_build_bad_request(error, MAX_STATUS_BYTES - status.ByteSize()))
    return status


def message_for_log(error: Exception, codes: Codes = STATED) -> str:
    """Returns the message of `status_from_error` without pieces of prompts."""
    return _shorten(error.log_message, MAX_MESSAGE_BYTES) if is_told(error, codes) else _INTERNAL_MESSAGE


def is_told(error: Exception, codes: Codes = STATED) -> TypeGuard[KilnError]:
    """Tells whether clients are told the error."""
    return isinstance(error, KilnError) and find_code(type(error), codes) is not None


def _build_status(code: Code, message: str, details: Iterable[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
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
