"""The messages between clients and forkservers: one per packet, over sockets that preserve packets.

A client sends a `ForkRequest`, with descriptors: a socket for reports about the process, the process's standard error,
and those that the call takes. The forkserver reports `Announced`, `Forked` and `Ended`, in this order, or `Refused` in
place of the last two. If a client shuts down its end of the reports, the forkserver kills the process. It answers a
`Ping` by closing its descriptor.
"""

from __future__ import annotations

import os
import select
import socket
from typing import Final

import msgspec

from bundle.host.confinement import Confinement

#: Size of the longest message, in bytes.
MAX_PACKET_SIZE_BYTES: Final = 1 << 16

#: Most descriptors of one request.
MAX_DESCRIPTORS: Final = 8


class Call(msgspec.Struct, frozen=True):
    """A function, `module:function`, which the process that calls it imports, and its arguments."""

    target: str
    args: tuple[str | int | None, ...] = ()


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the forkserver serves. The packet carries a socket, which the forkserver closes."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests a process, confined before its call, which takes the descriptors after its arguments.

    Process lists cut the name of the process after 15 bytes.
    """

    name: str
    call: Call
    confinement: Confinement


class Announced(msgspec.Struct, frozen=True, tag=True):
    """The forkserver is about to fork. If a client hangs up before this report, no process begins."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process runs. The packet carries the descriptor of the process."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process has ended, and with it all that it had started."""

    #: Negative for the signal that ended it.
    exit_code: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The host has no room for the process, which has not begun. See `ResourcesShort`."""

    resource: str
    detail: str


Request = ForkRequest | Ping
Report = Announced | Forked | Ended | Refused


def receive(end: socket.socket) -> tuple[bytes, list[int]]:
    """Receives a packet, empty if the other end has hung up, and its descriptors, which are not inheritable."""
    packet, fds, _, _ = socket.recv_fds(end, MAX_PACKET_SIZE_BYTES, MAX_DESCRIPTORS)
    for fd in fds:
        # MSG_CMSG_CLOEXEC would do, but `recv_fds` ignores flags (CPython's issue 107898).
        os.set_inheritable(fd, False)
    return packet, fds


def has_hung_up(end: socket.socket) -> bool:
    """Whether the other end of a socket, which sends nothing, has been closed or shut down."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))


encode = msgspec.json.encode
decode_call = msgspec.json.Decoder(Call).decode
decode_request = msgspec.json.Decoder[Request](Request).decode
decode_report = msgspec.json.Decoder[Report](Report).decode
