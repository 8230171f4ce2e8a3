"""A program that prints how many logical NeuronCores this host has: a number, or a failure, as a line of JSON.

A process of its own asks, because libnrt stays in a process that has loaded it. It takes no core.
"""

from __future__ import annotations

import ctypes
import sys

import msgspec

from bundle.errors import KilnError
from execution.device_errors import DeviceCallFailed
from execution.executors.neuron.library import open_library
from execution.executors.neuron.status import describe_status
from execution.failure import Failure

_CALL = "nrt_get_total_vnc_count"


def count_cores() -> int:
    """Counts the logical cores of this host, of the size that NEURON_LOGICAL_NC_CONFIG says.

    Raises:
        NeuronLibraryMissing: There is no libnrt, or it lacks a call.
        DeviceCallFailed: The library cannot tell, as without a driver.
    """
    total = ctypes.c_uint32()
    code = open_library().nrt_get_total_vnc_count(ctypes.byref(total))
    if code:
        raise DeviceCallFailed(_CALL, f"{describe_status(code).name} ({code})")
    return total.value


def main() -> None:
    """Prints the number, or what went wrong."""
    answer: int | Failure
    try:
        answer = count_cores()
    except KilnError as error:
        answer = Failure.of(error)
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main()
