import msgspec
import pytest

from bundle.errors import FieldViolation, KilnError
from execution.errors import ExecutableUnknown, ExecutionError, StepInvalid, WeightsInvalid
from execution.failure import Failure

ERRORS = [
    StepInvalid("decode_8", FieldViolation("inputs[x]", "3 values", "4 int32 values")),
    ExecutableUnknown("x", ["a", "b"]),
    WeightsInvalid(3, "two differ", [FieldViolation("tensors[a]", "nothing", "float32 [1]")] * 20),
    KilnError("come back later", retry_after_s=1.5, queue=3),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_named_errors_survive_the_way(error: KilnError) -> None:
    failure = msgspec.msgpack.decode(msgspec.msgpack.encode(Failure.of(error)), type=Failure)
    arrived = failure.to_error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.metadata == error.metadata
    assert arrived.violations == error.violations
    assert arrived.retry_after_s == error.retry_after_s


def test_an_unknown_class_keeps_its_message() -> None:
    error = Failure(error="elsewhere:Strange", message="it is strange", metadata={"a": "b"}).to_error()
    assert type(error) is KilnError
    assert str(error) == "it is strange"


def test_violations_are_limited() -> None:
    error = WeightsInvalid(3, "all differ", [FieldViolation("tensors[a]", "x" * 100, "y" * 100)] * 10_000)
    assert len(msgspec.msgpack.encode(Failure.of(error))) < 8192
    assert isinstance(error, ExecutionError)
