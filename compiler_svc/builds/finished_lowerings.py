"""The executables that a build has lowered so far. They outlive the build process. Results enter the action cache when
a whole build has succeeded, including its golden check; until then only the next attempt at the same build uses them.
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
    """One finished lowering."""

    executable: CachedExecutable
    duration_s: float


class FinishedLowerings:
    """A directory of executables and their records, named by action digest."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, action_digest: str) -> Path:
        """The path for the executable of an action, whether the file exists or not."""
        return self._directory / action_digest.removeprefix("sha256:")

    def keep(self, action_digest: str, lowered: LoweredExecutable, duration_s: float) -> FinishedLowering:
        """Moves an executable's files into the directory, then writes its record."""
        path = self.path(action_digest)
        for name, companion in lowered.companions.items():
            companion.rename(path.with_suffix(f".{name}"))
        lowered.path.rename(path)
        finished = FinishedLowering(
            executable=CachedExecutable(
                blob=sha256_file(path),
                size_bytes=path.stat().st_size,
                format=lowered.format,
                state_convention=lowered.state_convention,
                constants=lowered.constants,
                neff=lowered.neff,
            ),
            duration_s=duration_s,
        )
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(finished))
        unfinished.replace(path.with_suffix(_RECORD_SUFFIX))
        return finished

    def list_companions(self, action_digest: str) -> dict[str, Path]:
        """Lists the files that describe an executable, by what they are; none if another build lowered it."""
        path = self.path(action_digest)
        suffixes = {found.suffix: found for found in path.parent.glob(f"{path.name}.*")}
        return {suffix.removeprefix("."): found for suffix, found in suffixes.items() if suffix != _RECORD_SUFFIX}

    def find(self, action_digest: str) -> FinishedLowering | None:
        """Finds the result of an earlier attempt; None if there is none or its bytes differ from the record."""
        path = self.path(action_digest)
        try:
            finished = msgspec.json.decode(path.with_suffix(_RECORD_SUFFIX).read_bytes(), type=FinishedLowering)
            # A power cut may have left a record with an incomplete file.
            return finished if sha256_file(path) == finished.executable.blob else None
        except (OSError, msgspec.MsgspecError):
            return None
