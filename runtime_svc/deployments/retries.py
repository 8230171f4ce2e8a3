"""When a load that has failed is tried again: after which errors, and how long after."""

from __future__ import annotations

from typing import Final

from bundle.errors import BundleNotFound, KilnError, ResourcesShort
from execution.device_errors import DeviceBusy
from execution.errors import RankLost
from execution.text.errors import TextProcessLost
from runtime_svc.bundles.errors import BundleSourceRefused, CompilerTokenInvalid
from runtime_svc.errors import BundleSourceUnavailable, CoresUnavailable, MemoryUnavailable

#: A process of the load has ended, and the load may be why.
PROCESS_LOST: Final = (RankLost, TextProcessLost)
#: Others hold what the load needs.
NO_ROOM: Final = (CoresUnavailable, MemoryUnavailable)
#: Ends of a load that time or people mend, so that a declared or recorded deployment is loaded again. What comes from
#: its bundle, such as BlobCorrupt and ExecutableInvalid, would come again.
RETRIED: Final = (
    BundleSourceUnavailable,
    BundleSourceRefused,
    CompilerTokenInvalid,
    BundleNotFound,
    ResourcesShort,
    DeviceBusy,
    *PROCESS_LOST,
    *NO_ROOM,
)

FIRST_RETRY_S: Final = 0.5
MAX_RETRY_S: Final = 30.0
#: Longer, because a load whose processes end may take the host's memory from others each time.
MAX_LOST_RETRY_S: Final = 300.0


def may_pass(error: KilnError) -> bool:
    """Whether a load that ended so is tried again: never if the host will not have room in any case."""
    is_lasting = isinstance(error, NO_ROOM) and error.is_lasting
    return isinstance(error, RETRIED) and not is_lasting
