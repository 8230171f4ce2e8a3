"""How much one principal may have at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from edge.access.errors import PrincipalBusy
from edge.access.principal import Principal


class PrincipalQuota:
    """Bounds how many of a thing each known principal has at once. Anonymous callers share no bound."""

    def __init__(self, what: str, max_held: int, *, retry_after_s: float) -> None:
        self._what = what
        self._max_held = max_held
        self._retry_after_s = retry_after_s
        self._held: Counter[str] = Counter()

    def check(self, principal: Principal) -> None:
        """Checks that the principal may have one more."""
        if principal.is_known and self._held[principal.name] >= self._max_held:
            raise PrincipalBusy(principal.name, self._what, self._max_held, self._retry_after_s)

    def take(self, principal: Principal) -> None:
        """Counts one more; call `give_back` in the end."""
        self.check(principal)
        self._held[principal.name] += 1

    def give_back(self, principal: Principal) -> None:
        """Counts one less."""
        self._held[principal.name] -= 1
        if self._held[principal.name] == 0:
            del self._held[principal.name]

    @contextmanager
    def hold(self, principal: Principal) -> Iterator[None]:
        """Counts one more until the context ends."""
        self.take(principal)
        try:
            yield
        finally:
            self.give_back(principal)
