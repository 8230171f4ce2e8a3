"""Errors of devices, on which executables run that do not run on the host's processors.

KilnError
└── ExecutionError
    ├── NeuronLibraryMissing  no libnrt, or one without a call that Kiln makes
    ├── DeviceUnsuitable      a bundle that was made for other cores than this host has
    ├── DeviceBusy            cores that another process has
    ├── DeviceMemoryShort     a core without memory for what a call needs
    ├── DeviceCallFailed      a call of the device's library that failed outside of a step
    └── RankLost
        ├── DeviceHung        a core that does not end its step, perhaps because of another rank
        └── DeviceBroken      a core that needs a reset
"""

from __future__ import annotations

from typing import Final

from bundle.errors import FieldViolation
from execution.errors import ExecutionError, RankLost

#: Cores are free a moment after their process has ended.
_BUSY_RETRY_S: Final = 5.0


class NeuronLibraryMissing(ExecutionError):
    """No libnrt, or one without a call that Kiln makes."""

    reason = "NEURON_LIBRARY_MISSING"

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"{detail}: install aws-neuronx-runtime-lib and, for several ranks, aws-neuronx-collectives, of SDK 2.29 "
            "or newer",
            detail=detail,
        )


class DeviceUnsuitable(ExecutionError):
    """A bundle that was made for other cores than this host has; `violations` names the field."""

    reason = "DEVICE_UNSUITABLE"

    def __init__(self, field: str, value: str, accepted: str) -> None:
        violation = FieldViolation(field, value, accepted)
        super().__init__(f"this host cannot run the bundle: {violation}", violations=(violation,), field=field)


class DeviceBusy(ExecutionError):
    """Cores that another process has."""

    reason = "DEVICE_BUSY"

    def __init__(self, cores: str, status: str) -> None:
        super().__init__(
            f"another process has cores {cores} ({status})", retry_after_s=_BUSY_RETRY_S, cores=cores, status=status
        )


class DeviceMemoryShort(ExecutionError):
    """A core without memory for what a call needs. What it holds already stays.

    `needed_bytes` is None if only the device's library knows it.
    """

    reason = "DEVICE_MEMORY_SHORT"

    def __init__(self, what: str, needed_bytes: int | None, free_bytes: int) -> None:
        need = "more is needed" if needed_bytes is None else f"{needed_bytes} bytes are needed"
        missing_bytes = max(0, (needed_bytes or 0) - free_bytes)
        lack = f"{missing_bytes} are missing" if missing_bytes else "no piece is large enough"
        super().__init__(
            f"the core has no memory for {what}: {need}, {free_bytes} bytes are free, {lack}",
            what=what,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            missing_bytes=missing_bytes,
        )


class DeviceCallFailed(ExecutionError):
    """A call of the device's library that failed outside of a step."""

    reason = "DEVICE_CALL_FAILED"

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call} failed: {status}", call=call, status=status)


class DeviceHung(RankLost):
    """A core that does not end its step, perhaps because of another rank: the group ends, and ranks restart."""

    reason = "DEVICE_HUNG"

    def __init__(self, call: str, status: str) -> None:
        self.rank = 0
        super().__init__(f"the core hangs: {call} ended with {status}", call=call, status=status)


class DeviceBroken(RankLost):
    """A core that needs a reset: the group ends, and the operator has to act."""

    reason = "DEVICE_BROKEN"

    def __init__(self, call: str, status: str) -> None:
        self.rank = 0
        super().__init__(f"the core cannot go on without a reset: {call} ended with {status}", call=call, status=status)
