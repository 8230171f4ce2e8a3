"""The calls that a server takes, what it answers to bytes, what each answer costs it, and why calls fail."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import psutil
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from tests.processes import living_descendants, name_of

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Rpc:
    """A method of a server.

    Attributes:
        path: As gRPC writes it, `/package.Service/Method`.
    """

    path: str
    request: Descriptor
    is_client_streaming: bool
    is_server_streaming: bool


@dataclass(frozen=True)
class Answer:
    """What a server made of one request.

    Attributes:
        code: None if the caller stopped reading before the stream had ended.
        message: Text of the status.
        num_responses: How many responses were read.
        cpu_s: Processor time of the server and of those of its processes that plan or render for it.
    """

    code: grpc.StatusCode | None
    message: str
    num_responses: int
    cpu_s: float


class Meter:
    """Reads what a server has used so far, with the children whose work belongs to its answers."""

    def __init__(self, pid: int, children: Sequence[str] = ()) -> None:
        """Takes the server's process, and the names of children; their own children count once they have ended."""
        self.pid = pid
        self._names = children
        self._children: list[psutil.Process] = []
        self._ticks = {pid: 0}
        self._total_ticks = 0
        self._read_at_s = 0.0

    def read_cpu_s(self) -> float:
        """Processor time so far, in seconds; of a child that older readings have missed, from this one on."""
        if len(self._children) < len(self._names) or not all(child.is_running() for child in self._children):
            self._children = [one for one in living_descendants(self.pid) if name_of(one) in self._names]
        for child in self._children:
            if child.pid not in self._ticks:
                is_new = child.create_time() > self._read_at_s
                self._ticks[child.pid] = 0 if is_new else _read_ticks(child.pid)
        for pid in (self.pid, *(child.pid for child in self._children)):
            ticks = _read_ticks(pid)
            self._total_ticks += max(0, ticks - self._ticks[pid])
            self._ticks[pid] = ticks
        self._read_at_s = time.time()
        return self._total_ticks / _TICKS_PER_S

    def read_resident_bytes(self) -> int:
        """Resident memory of the server itself, without files that it has mapped."""
        memory = psutil.Process(self.pid).memory_info()
        return int(memory.rss - memory.shared)


def list_rpcs(channel: grpc.Channel) -> list[Rpc]:
    """Asks a server for its services and their descriptors, by reflection."""
    database = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(database)
    return [
        Rpc(
            path=f"/{service}/{method.name}",
            request=method.input_type,
            is_client_streaming=method.client_streaming,
            is_server_streaming=method.server_streaming,
        )
        for service in database.get_services()
        for method in pool.FindServiceByName(service).methods
    ]


def send(channel: grpc.Channel, rpc: Rpc, requests: Sequence[bytes], meter: Meter, *, max_responses: int) -> Answer:
    """Sends bytes as the requests of one call and reads some of the responses.

    Args:
        requests: One, unless clients stream.
        max_responses: How many responses of a stream are read before the call is cancelled.
    """
    kind = f"{'stream' if rpc.is_client_streaming else 'unary'}_{'stream' if rpc.is_server_streaming else 'unary'}"
    method = getattr(channel, kind)(rpc.path, request_serializer=None, response_deserializer=None)
    sent = iter(requests) if rpc.is_client_streaming else requests[0]
    before_s = meter.read_cpu_s()
    num_responses, code, message = 0, None, ""
    try:
        if not rpc.is_server_streaming:
            method(sent, timeout=TIMEOUT_S)
            num_responses, code = 1, grpc.StatusCode.OK
        else:
            call = method(sent, timeout=TIMEOUT_S)
            for _ in call:
                num_responses += 1
                if num_responses == max_responses:
                    call.cancel()
                    break
            else:
                code = grpc.StatusCode.OK
    except grpc.RpcError as error:
        code, message = error.code(), error.details() or ""
    return Answer(code, message, num_responses, max(0.0, meter.read_cpu_s() - before_s))


#: Seconds after which an answer has not come.
TIMEOUT_S: Final = 20.0


def _read_ticks(pid: int) -> int:
    """Ticks that a process, and its children that have ended, have run; 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - in every call
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # utime, stime, cutime, cstime.
    return sum(map(int, fields[11:15]))


def reason_in(status: Any) -> str:
    """The ErrorInfo reason of the status of a call or an operation; empty if it has none."""
    info = error_details_pb2.ErrorInfo()
    return str(info.reason) if any(detail.Unpack(info) for detail in status.details) else ""


def reason_of(error: Any) -> str:
    """The reason of a failed call; empty if its status is gRPC's own, as that of a connection that is gone."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the client's own deadline passed while the server's answer came
        status = None
    return "" if status is None else reason_in(status)
