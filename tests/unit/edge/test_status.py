from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import (
    BlobCorrupt,
    BlobNotFound,
    BundleError,
    DigestInvalid,
    FieldViolation,
    KilnError,
    RefInvalid,
)
from edge.status import BUNDLE_STATUSES, MAX_MESSAGE_BYTES, MAX_STATUS_BYTES, status_from_error, unmapped_errors


class ServiceError(KilnError):
    reason = "SERVICE_ERROR"


class QueueFull(ServiceError):
    reason = "QUEUE_FULL"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are waiting", retry_after_s=1.25, limit=limit)


class ConfigInvalid(ServiceError):
    reason = "CONFIG_INVALID"


TABLE = {ServiceError: grpc.StatusCode.UNAVAILABLE, QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED}


def detail(status: status_pb2.Status, kind: type[Message]) -> Any:
    for packed in status.details:
        message = kind()
        if packed.Is(kind.DESCRIPTOR):
            packed.Unpack(message)
            return message
    return None


def test_code_message_reason_and_metadata() -> None:
    status = status_from_error(QueueFull(8), TABLE)
    assert (status.code, status.message) == (8, "8 requests are waiting")
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason, dict(info.metadata)) == ("kiln", "QUEUE_FULL", {"limit": "8"})


def test_nearest_base_class_decides() -> None:
    class PromptQueueFull(QueueFull):
        reason = "PROMPT_QUEUE_FULL"

    assert status_from_error(PromptQueueFull(1), TABLE).code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status_from_error(ConfigInvalid("x"), TABLE).code == grpc.StatusCode.UNAVAILABLE.value[0]
    info = detail(status_from_error(PromptQueueFull(1), TABLE), error_details_pb2.ErrorInfo)
    assert info.reason == "PROMPT_QUEUE_FULL"


def test_retry_info_where_trying_again_makes_sense() -> None:
    retry = detail(status_from_error(QueueFull(8), TABLE), error_details_pb2.RetryInfo)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 250_000_000)
    assert detail(status_from_error(ConfigInvalid("x"), TABLE), error_details_pb2.RetryInfo) is None


def test_violations_become_a_bad_request() -> None:
    violations = (FieldViolation("a.b", "-1", "1 or more"), FieldViolation("a.c", "'x'", "'y', 'z'"))
    status = status_from_error(ConfigInvalid("two mistakes", violations=violations), TABLE)
    request = detail(status, error_details_pb2.BadRequest)
    assert [(v.field, v.description, v.reason) for v in request.field_violations] == [
        ("a.b", "got -1; accepted: 1 or more", "CONFIG_INVALID"),
        ("a.c", "got 'x'; accepted: 'y', 'z'", "CONFIG_INVALID"),
    ]
    assert detail(status_from_error(QueueFull(8), TABLE), error_details_pb2.BadRequest) is None


@pytest.mark.parametrize(
    "error", [ValueError("password=1234"), BlobNotFound("sha256:secret"), OSError(28, "No space left", "/secret")]
)
def test_unmapped_error_says_nothing_of_itself(error: Exception) -> None:
    status = status_from_error(error, TABLE)
    assert (status.code, status.message) == (grpc.StatusCode.INTERNAL.value[0], "internal error")
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.reason, dict(info.metadata)) == ("INTERNAL", {})
    assert len(status.details) == 1


def test_bundle_errors_have_their_codes() -> None:
    digest = "sha256:" + "0" * 64
    codes = {
        DigestInvalid("x"): grpc.StatusCode.INVALID_ARGUMENT,
        RefInvalid("x", "y"): grpc.StatusCode.INVALID_ARGUMENT,
        BlobNotFound(digest): grpc.StatusCode.NOT_FOUND,
        BlobCorrupt(digest, digest, "title"): grpc.StatusCode.DATA_LOSS,
    }
    assert {error: status_from_error(error, BUNDLE_STATUSES).code for error in codes} == {
        error: code.value[0] for error, code in codes.items()
    }
    assert unmapped_errors(BUNDLE_STATUSES, [BundleError]) == []
    # The base class is a net for what is new; what exists is there by name.
    named = {kind: code for kind, code in BUNDLE_STATUSES.items() if kind is not BundleError}
    assert unmapped_errors(named, [BundleError]) == [BundleError]


def test_unmapped_classes_are_found() -> None:
    class Forgotten(KilnError):
        pass

    class ForgottenToo(Forgotten):
        pass

    assert unmapped_errors(TABLE, [ServiceError]) == []
    assert unmapped_errors(TABLE, [ServiceError, Forgotten]) == [Forgotten, ForgottenToo]
    assert unmapped_errors({ForgottenToo: grpc.StatusCode.ABORTED}, [Forgotten]) == [Forgotten]


texts = st.text() | st.text(alphabet="ü€😀\ud800\0", max_size=3000) | st.just("x" * 100_000)
violations_lists = st.lists(st.builds(FieldViolation, texts, texts, texts), max_size=40)


@given(texts, violations_lists, st.dictionaries(st.sampled_from(["limit", "name", "path"]), texts))
def test_status_fits_a_trailer_whatever_the_caller_sent(
    message: str, violations: list[FieldViolation], metadata: dict[str, str]
) -> None:
    error = ConfigInvalid(message, violations=tuple(violations), retry_after_s=1, **metadata)
    status = status_from_error(error, TABLE)
    assert len(status.message.encode()) <= MAX_MESSAGE_BYTES
    assert status.ByteSize() <= MAX_STATUS_BYTES + 200
    request = detail(status, error_details_pb2.BadRequest)
    assert (request is None) == (violations == [])


def test_violations_that_do_not_fit_are_counted() -> None:
    violations = tuple(FieldViolation(f"field_{n}", "x" * 100, "y" * 100) for n in range(50))
    request = detail(status_from_error(ConfigInvalid("x", violations=violations), TABLE), error_details_pb2.BadRequest)
    *told, last = request.field_violations
    assert [violation.field for violation in told] == [f"field_{n}" for n in range(len(told))]
    assert 5 < len(told) < 50
    assert last.description == f"and {50 - len(told)} more violations"
