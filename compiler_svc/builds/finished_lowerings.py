"""What a build has lowered so far, kept over the death of its process.

Results enter the action cache only when a whole build has succeeded, its golden check included. Until then they are
here, for nobody but the next attempt at the same build.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from bundle.digest import sha256_file
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.lower.job import LoweredExecutable

_RECORD_SUFFIX: Final = ".json"


class FinishedLowering(msgspec.Struct, frozen=True, kw_only=True):
    """One finished lowering.

    Attributes:
        duration_s: Seconds that it took.
    """

    executable: CachedExecutable
    duration_s: float


class FinishedLowerings:
    """A directory of executables and their records, named by action digest."""

    def __init__(self, directory: Path) -> None:
        """Takes an existing directory."""
        self._directory = directory

    def path(self, action_digest: str) -> Path:
        """Where the executable of an action is, or would be."""
        return self._directory / action_digest.removeprefix("sha256:")

    def keep(self, action_digest: str, lowered: LoweredExecutable, duration_s: float) -> FinishedLowering:
        """Takes an executable's file and records it, the record last."""
        path = self.path(action_digest)
        lowered.path.rename(path)
        finished = FinishedLowering(
            executable=CachedExecutable(
                blob=sha256_file(path),
                size_bytes=path.stat().st_size,
                format=lowered.format,
                state_convention=lowered.state_convention,
                constants=lowered.constants,
            ),
            duration_s=duration_s,
        )
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(finished))
        unfinished.replace(path.with_suffix(_RECORD_SUFFIX))
        return finished

    def find(self, action_digest: str) -> FinishedLowering | None:
        """What an earlier attempt lowered, None where there is nothing or its bytes are not what was recorded."""
        path = self.path(action_digest)
        try:
            finished = msgspec.json.decode(path.with_suffix(_RECORD_SUFFIX).read_bytes(), type=FinishedLowering)
            # A power cut may have left a record whose file is not whole.
            return finished if sha256_file(path) == finished.executable.blob else None
        except (OSError, msgspec.MsgspecError):
            return None
