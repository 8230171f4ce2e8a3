"""What a followed alias named when it was looked up last, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from bundle.errors import KilnError


@dataclass(frozen=True, slots=True)
class FollowedVersion:
    """The version that a followed alias named when it was looked up last.

    Attributes:
        version: Its name, `NAME:vN`; empty if the source of bundles did not tell one.
        digest: Its digest; empty if the look-up failed, or there was none so far.
        error: Why its weights do not serve; None if they do, or are being loaded.
    """

    version: str = ""
    digest: str = ""
    serves: bool = False
    error: KilnError | None = None

    @property
    def is_taken(self) -> bool:
        """Whether its weights serve, or are being loaded."""
        return bool(self.digest) and self.error is None

    @property
    def message(self) -> str:
        """What `error` says, and of which version; empty without one."""
        name = f"{self.version} ({self.digest})" if self.version else self.digest
        which = f"{name} does not serve: " if name else ""
        return "" if self.error is None else f"{which}{self.error}"

    @property
    def cause(self) -> tuple[str, str] | None:
        """Digest and reason of the error; None without one."""
        return None if self.error is None else (self.digest, self.error.reason)
