"""The statuses that this service answers with."""

from __future__ import annotations

from typing import Final

from google.rpc import status_pb2

from edge.status import Codes, status_from_error
from execution.errors import ExecutionError
from execution.failure import Failure
from execution.text.errors import TextError, TextProcessLost

#: What this service executes, it has built itself: that this fails is never its caller's fault.
CODES: Final[Codes] = {ExecutionError: "INTERNAL", TextError: "INTERNAL", TextProcessLost: "UNAVAILABLE"}


def status_from_failure(failure: Failure) -> status_pb2.Status:
    """Renders a recorded error."""
    return status_from_error(failure.to_error(), CODES)
