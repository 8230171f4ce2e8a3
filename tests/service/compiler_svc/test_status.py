import grpc

from compiler_svc.api.status import CODES, status_from_failure
from edge.status import find_code
from execution.device_errors import DeviceBusy
from execution.failure import Failure
from execution.text.errors import TextProcessLost, TextRefused


def test_what_the_compiler_executes_fails_by_its_own_fault() -> None:
    assert [find_code(error, CODES) for error in (DeviceBusy, TextRefused, TextProcessLost)] == [
        "INTERNAL",
        "INTERNAL",
        "UNAVAILABLE",
    ]


def test_a_failure_of_a_class_that_is_gone_tells_nothing() -> None:
    failure = Failure(error="compiler_svc.gone:Gone", message="a secret", metadata={})
    status = status_from_failure(failure)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in status.message
