"""The session that a Generate call names, and the server's bounds on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bundle.errors import FieldViolation
from edge.request_id import REQUEST_ID, make_id_violation
from runtime_svc.engine.request import Session, SessionLimits

#: The shortest time for which a client may have a session kept, unless the server's own is shorter.
MIN_TTL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SessionCall:
    """A session as the client named it; it is kept for `ttl_s` after the request, and None means unset."""

    session_id: str
    ttl_s: float | None = None

    def find_violations(self, limits: SessionLimits) -> Iterator[FieldViolation]:
        """Yields what is wrong with it."""
        if not self.session_id:
            yield FieldViolation("session_ttl", "set", "unset without session_id")
        elif not REQUEST_ID.fullmatch(self.session_id):
            yield make_id_violation("session_id", self.session_id)
        least_s = min(MIN_TTL_S, limits.default_ttl_s)
        if self.ttl_s is not None and not least_s <= self.ttl_s <= limits.max_ttl_s:
            yield FieldViolation("session_ttl", f"{self.ttl_s:g} s", f"{least_s:g} s to {limits.max_ttl_s:g} s")

    def resolve(self, caller: str, limits: SessionLimits, now_s: float) -> Session:
        """Makes the session as it is if the caller has none of this name. The call has no violations."""
        ttl_s = limits.default_ttl_s if self.ttl_s is None else self.ttl_s
        return Session(caller, self.session_id, ttl_s, now_s)
