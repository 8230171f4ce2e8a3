"""Names the operating system's errors that pass by themselves once the host has room again."""

from __future__ import annotations

import errno
import os
from typing import Final

from bundle.errors import ResourcesShort

RETRY_AFTER_S: Final = 30.0

#: What the host is short of, by number of the error. EAGAIN is not among them: locks answer with it, too.
_RESOURCES: Final = {
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk space within the quota",
    errno.EMFILE: "descriptors of this process",
    errno.ENFILE: "descriptors",
    errno.ENOMEM: "memory",
}


def name_shortage(error: OSError) -> ResourcesShort | None:
    """The named error of a shortage, without the paths that the error has; None for any other error."""
    if error.errno not in _RESOURCES:
        return None
    return ResourcesShort(_RESOURCES[error.errno], os.strerror(error.errno), RETRY_AFTER_S)
