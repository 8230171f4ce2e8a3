"""A program that prints how many logical NeuronCores this host has, and of which target: both, or a failure, as JSON.

A process of its own asks, because libnrt stays in a process that has loaded it. It takes no core. AWS's header says of
the call that counts, not of the one that names the kind, that it may come before nrt_init. So the count is printed
before the second call is made, and again with what that says, each on a line.
"""

from __future__ import annotations

import ctypes
import sys

import msgspec

from bundle.errors import KilnError
from execution.device_errors import DeviceCallFailed
from execution.executors.neuron.device import FAMILIES
from execution.executors.neuron.library import InstanceInfo, open_library
from execution.executors.neuron.status import tell_status
from execution.failure import Failure

_CALL = "nrt_get_total_vnc_count"


def count_cores() -> int:
    """Counts the logical cores of this host, of the size that NEURON_LOGICAL_NC_CONFIG says."""
    total = ctypes.c_uint32()
    code = open_library().nrt_get_total_vnc_count(ctypes.byref(total))
    if code:
        raise DeviceCallFailed(_CALL, tell_status(code))
    return total.value


def find_kind() -> str | None:
    """Names the target whose cores this host has; None if the library does not say, or Kiln does not know it."""
    info = InstanceInfo()
    code = open_library().nrt_get_instance_info(ctypes.byref(info), ctypes.sizeof(info))
    return None if code else FAMILIES.get(info.family)


def main() -> None:
    """Prints the number and the target, or what went wrong."""
    try:
        total = count_cores()
    except KilnError as error:
        _print(Failure.of(error))
        return
    _print((total, None))
    _print((total, find_kind()))


def _print(answer: tuple[int, str | None] | Failure) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
