"""What each status of libnrt (nrt_status.h) means for a rank, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


class Consequence(enum.Enum):
    """What a rank does about a status."""

    #: The outputs are there, some of them without numbers. Rows without numbers are marked one by one, so a step of
    #: several sequences goes on for the others.
    COUNT = "count"
    #: The call fails; the rank lives.
    FAIL = "fail"
    #: The memory of the core is used up; the call fails, and the rank lives.
    SHORT = "short"
    #: Another process has the core; loading may be tried again later.
    BUSY = "busy"
    #: The bundle does not fit this host.
    REFUSE = "refuse"
    #: The core hangs, perhaps because of another rank: the group ends.
    HANG = "hang"
    #: The core needs a reset: the group ends, and the core is not used again.
    BREAK = "break"
    #: A mistake of ours.
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class Status:
    """A status; its name is that in nrt_status.h. A remark follows it in errors."""

    name: str
    consequence: Consequence
    remark: str = ""


#: The status of `nrt_init` for cores of another process, and for whatever has no status of its own.
FAILURE: Final = 1

STATUSES: Final[Mapping[int, Status]] = MappingProxyType(
    {
        FAILURE: Status("NRT_FAILURE", Consequence.FAIL),
        2: Status("NRT_INVALID", Consequence.FAIL),
        3: Status("NRT_INVALID_HANDLE", Consequence.BUG),
        4: Status("NRT_RESOURCE", Consequence.SHORT),
        5: Status("NRT_TIMEOUT", Consequence.HANG),
        6: Status("NRT_HW_ERROR", Consequence.BREAK),
        7: Status("NRT_QUEUE_FULL", Consequence.BUSY),
        9: Status("NRT_LOAD_NOT_ENOUGH_NC", Consequence.REFUSE),
        10: Status("NRT_UNSUPPORTED_NEFF_VERSION", Consequence.REFUSE),
        11: Status("NRT_FAIL_HOST_MEM_ALLOC", Consequence.FAIL),
        13: Status("NRT_UNINITIALIZED", Consequence.BUG),
        14: Status("NRT_CLOSED", Consequence.BUG),
        # Of calls that Kiln does not make.
        15: Status("NRT_QUEUE_EMPTY", Consequence.BUG),
        101: Status("NRT_EXEC_UNIT_UNRECOVERABLE", Consequence.BREAK),
        1002: Status("NRT_EXEC_BAD_INPUT", Consequence.FAIL),
        1003: Status("NRT_EXEC_COMPLETED_WITH_NUM_ERR", Consequence.COUNT),
        1004: Status("NRT_EXEC_COMPLETED_WITH_ERR", Consequence.BREAK),
        1005: Status("NRT_EXEC_NC_BUSY", Consequence.BUSY),
        1006: Status("NRT_EXEC_OOB", Consequence.FAIL),
        1100: Status("NRT_COLL_PENDING", Consequence.BUG),
        1200: Status("NRT_EXEC_HW_ERR_COLLECTIVES", Consequence.HANG),
        1201: Status("NRT_EXEC_HW_ERR_HBM_UE", Consequence.BREAK),
        1202: Status("NRT_EXEC_HW_ERR_NC_UE", Consequence.BREAK),
        1203: Status("NRT_EXEC_HW_ERR_DMA_ABORT", Consequence.BREAK),
        1204: Status("NRT_EXEC_SW_NQ_OVERFLOW", Consequence.BREAK),
        1205: Status("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", Consequence.BREAK),
        1206: Status("NRT_NETWORK_PROXY_FAILURE", Consequence.BREAK),
    }
)


#: What a status means in `nrt_init`, where that differs: no memory can be counted before it has succeeded.
INIT_STATUSES: Final[Mapping[int, Status]] = MappingProxyType(
    {4: Status("NRT_RESOURCE", Consequence.FAIL, ", of the host or of the core: the rank's log has what libnrt says")}
)


def describe_status(code: int, call: str = "") -> Status:
    """Returns what a status of a call means; one that no header of ours has fails its call."""
    special = INIT_STATUSES if call == "nrt_init" else {}
    return special.get(code) or STATUSES.get(code) or Status("a status that is not in nrt_status.h", Consequence.FAIL)


def tell_status(code: int, call: str = "") -> str:
    """Returns a status of a call as errors tell it: `NRT_FAILURE (1)`."""
    status = describe_status(code, call)
    return f"{status.name} ({code}){status.remark}"
