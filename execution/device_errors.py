"""Errors of devices, on which executables run that do not run on the host's processors."""

from __future__ import annotations

from typing import Final

from bundle.errors import FieldViolation, Unsaid
from execution.errors import ExecutionError, RankLost

#: Cores are free a moment after their process has ended.
_BUSY_RETRY_S: Final = 5.0


class NeuronLibraryMissing(ExecutionError, code="FAILED_PRECONDITION"):
    """No libnrt, or one without a call that Kiln makes."""

    message = (
        "{detail}: install aws-neuronx-runtime-lib and, for several ranks, aws-neuronx-collectives, of SDK 2.29 or "
        "newer"
    )
    detail: str


class DeviceUnsuitable(ExecutionError, code="FAILED_PRECONDITION"):
    """A bundle that was made for other cores than this host has; `violations` names the field."""

    message = "this host cannot run the bundle: {violation}"
    violation = FieldViolation("{field}", "{value}", "{accepted}")
    field: str
    value: Unsaid[str]
    accepted: Unsaid[str]


class DeviceBusy(ExecutionError, code="UNAVAILABLE"):
    """Cores that another process has, as far as can be told: the device's library has no status for that alone."""

    message = "cores {cores} cannot be taken: {cause} ({status})"
    retry_after_s = _BUSY_RETRY_S
    cores: str
    status: str
    cause: str


class DeviceMemoryShort(ExecutionError, code="RESOURCE_EXHAUSTED"):
    """A core without memory for what a call needs. What it holds already stays.

    `needed_bytes` is None if only the device's library knows it, `free_bytes` if the library does not tell.
    """

    def __init__(self, what: str, needed_bytes: int | None, free_bytes: int | None) -> None:
        need = "more is needed" if needed_bytes is None else f"{needed_bytes} bytes are needed"
        missing_bytes = None if free_bytes is None else max(0, (needed_bytes or 0) - free_bytes)
        lack = f"{missing_bytes} are missing" if missing_bytes else "no piece is large enough"
        rest = "how much is free is unknown" if free_bytes is None else f"{free_bytes} bytes are free, {lack}"
        super().__init__(
            f"the core has no memory for {what}: {need}, {rest}",
            what=what,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            missing_bytes=missing_bytes,
        )


class DeviceCallFailed(ExecutionError, code="INTERNAL"):
    """A call of the device's library that failed outside of a step."""

    message = "{call} failed: {status}"
    call: str
    status: str


class DeviceHung(RankLost):
    """A core that does not end its step, perhaps because of another rank: the group ends, and ranks restart."""

    message = "the core hangs: {call} ended with {status}"
    call: str
    status: str


class DeviceBroken(RankLost):
    """A core that needs a reset: the group ends, and the operator has to act."""

    message = "the core cannot go on without a reset: {call} ended with {status}"
    call: str
    status: str
