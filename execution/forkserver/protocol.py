"""What clients and forkservers say to each other: one message a packet, over sockets that keep packets whole.

A client sends a `ForkRequest`, with descriptors: a socket for reports about the process, the process's standard error,
and what the call takes. The forkserver reports `Announced`, `Forked` and `Ended`, in this order. A client that shuts
its end of the reports down has the process killed.
"""

from __future__ import annotations

import os
import select
import socket
from typing import Final

import msgspec

#: No message is longer.
MAX_PACKET_SIZE_BYTES: Final = 1 << 16

#: No request comes with more descriptors.
MAX_DESCRIPTORS: Final = 8


class Call(msgspec.Struct, frozen=True):
    """A function and what it is called with.

    Attributes:
        target: `module:function`, imported in the process that calls it.
    """

    target: str
    args: tuple[str | int | None, ...] = ()


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a process.

    Attributes:
        name: The process's, as process lists show it; they cut it after 15 bytes.
        call: What the process does; descriptors follow the call's arguments.
    """

    name: str
    call: Call


class Announced(msgspec.Struct, frozen=True, tag=True):
    """The forkserver is about to fork. Before this, a client that hangs up knows that no process will begin."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process runs. With it comes the descriptor of the process."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process has ended, and nothing is left of its process group."""

    #: Negative for the signal that ended it.
    exit_code: int


Report = Announced | Forked | Ended


def receive(end: socket.socket) -> tuple[bytes, list[int]]:
    """Receives a packet, empty if the other end has hung up, and its descriptors, which no program will inherit."""
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
decode_request = msgspec.json.Decoder(ForkRequest).decode
decode_report = msgspec.json.Decoder[Report](Report).decode
