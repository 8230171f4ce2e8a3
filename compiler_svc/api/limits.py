"""Limits on requests: the service keeps, hashes and compares their content, so it must not be huge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.errors import FieldViolation
from compiler_svc.errors import ConfigInvalid, TooManyStreams
from edge.request_limit import RequestLimit

#: The largest request of any method; the server refuses larger ones before it parses them.
REQUEST_LIMIT: Final = RequestLimit(max_bytes=256 << 10)
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_SALT_CHARACTERS: Final = 256


#: The requests that start an operation.
OperationRequest = pb.CompileRequest | pb.ShardWeightsRequest | pb.ShardAdapterRequest | pb.QuantizeWeightsRequest


def check_limits(request: OperationRequest | pb.PlanCompileRequest) -> None:
    """Checks lengths before the service does anything else with a request."""
    violations = []
    salt = request.salt if isinstance(request, pb.CompileRequest | pb.PlanCompileRequest) else ""
    request_id = "" if isinstance(request, pb.PlanCompileRequest) else request.request_id
    for field, text, most in (
        ("request_id", request_id, MAX_REQUEST_ID_CHARACTERS),
        ("salt", salt, MAX_SALT_CHARACTERS),
    ):
        if len(text) > most:
            violations.append(FieldViolation(field, f"{len(text)} characters", f"at most {most}"))
    if violations:
        raise ConfigInvalid(violations)


_RETRY_AFTER_S: Final = 5.0


class StreamLimit:
    """Limits how many streams of one method are open."""

    def __init__(self, method: str, max_open: int) -> None:
        self._method = method
        self._max_open = max_open
        self._num_open = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Counts a stream until the context ends."""
        if self._num_open >= self._max_open:
            raise TooManyStreams(self._method, self._max_open, _RETRY_AFTER_S)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
