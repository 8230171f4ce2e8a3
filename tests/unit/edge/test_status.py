from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import FieldViolation, KilnError
from edge.status import MAX_MESSAGE_BYTES, MAX_STATUS_BYTES, status_from_error


class ServiceError(KilnError, code="UNAVAILABLE"):
    """The root of the others."""


class QueueFull(ServiceError, code="RESOURCE_EXHAUSTED"):
    message = "{limit} requests are waiting"
    retry_after_s = 1.25
    limit: int


class ConfigInvalid(ServiceError):
    """One whose code is that of its base."""


class Untold(KilnError):
    """One without a code."""


def detail(status: status_pb2.Status, kind: type[Message]) -> Any:
    for packed in status.details:
        message = kind()
        if packed.Is(kind.DESCRIPTOR):
            packed.Unpack(message)
            return message
    return None


def test_nearest_base_class_decides() -> None:
    assert status_from_error(ConfigInvalid("x")).code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert status_from_error(QueueFull(1), {ServiceError: "INTERNAL"}).code == grpc.StatusCode.INTERNAL.value[0]
    assert status_from_error(QueueFull(1), {ConfigInvalid: "INTERNAL"}).code == 8


def test_what_does_not_apply_is_left_out() -> None:
    kinds = {packed.TypeName().rpartition(".")[2] for packed in status_from_error(ConfigInvalid("x")).details}
    assert kinds == {"ErrorInfo"}


texts = st.text() | st.text(alphabet="ü€😀\ud800\0", max_size=3000) | st.just("x" * 100_000)
violations_lists = st.lists(st.builds(FieldViolation, texts, texts, texts), max_size=40)


@given(texts, violations_lists, st.dictionaries(st.sampled_from(["limit", "name", "path"]), texts))
def test_status_fits_a_trailer_whatever_the_caller_sent(
    message: str, violations: list[FieldViolation], metadata: dict[str, str]
) -> None:
    error = ConfigInvalid(message, violations=tuple(violations), retry_after_s=1, **metadata)
    status = status_from_error(error)
    assert len(status.message.encode()) <= MAX_MESSAGE_BYTES
    assert status.ByteSize() <= MAX_STATUS_BYTES + 200
    request = detail(status, error_details_pb2.BadRequest)
    assert (request is None) == (violations == [])


def test_violations_that_do_not_fit_are_counted() -> None:
    violations = tuple(FieldViolation(f"field_{n}", "x" * 100, "y" * 100) for n in range(50))
    request = detail(status_from_error(ConfigInvalid("x", violations=violations)), error_details_pb2.BadRequest)
    *told, last = request.field_violations
    assert [violation.field for violation in told] == [f"field_{n}" for n in range(len(told))]
    assert 5 < len(told) < 50
    assert last.description == f"and {50 - len(told)} more violations"
