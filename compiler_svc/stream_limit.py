"""A bound on streams that are open at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from compiler_svc.errors import TooManyStreams

_RETRY_AFTER_S: Final = 5.0


class StreamLimit:
    """Lets a limited number of streams of one method be open."""

    def __init__(self, method: str, most: int) -> None:
        """Starts with none open."""
        self._method = method
        self._most = most
        self._num_open = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Counts a stream as long as the context lasts.

        Raises:
            TooManyStreams: As many are open as may be.
        """
        if self._num_open >= self._most:
            raise TooManyStreams(self._method, self._most, _RETRY_AFTER_S)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
