"""Where public keys come from: a file or a URL, both of which may change."""

from __future__ import annotations

import asyncio
import ssl
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol
from urllib import request

import structlog

from edge.access.changing_file import MAX_BYTES, ChangingFile
from edge.access.errors import KeySetInvalid, KeysUnavailable
from edge.access.key_set import KeySet
from edge.loopback import is_local_url
from edge.supervision import Supervisor

#: How often keys are fetched from a URL.
REFRESH_INTERVAL_S: Final = 300.0
#: Shortest time between two fetches, whatever keys tokens name.
MIN_FETCH_INTERVAL_S: Final = 10.0
#: Time that one fetch may take.
FETCH_TIMEOUT_S: Final = 5.0

_log = structlog.get_logger("edge")


class KeySource(Protocol):
    """Where public keys come from."""

    async def start(self, supervisor: Supervisor) -> None:
        """Gets the keys for the first time; the supervisor runs what keeps them fresh."""

    async def get(self) -> KeySet:
        """Returns the keys as far as they are known.

        Raises:
            KeysUnavailable: None are known yet.
        """

    async def refresh(self) -> KeySet:
        """Returns the keys after another look, unless the last one was just now.

        Raises:
            KeysUnavailable: None are known yet.
        """


def open_key_source(place: str) -> KeySource:
    """Makes the source for a path or an https URL."""
    return KeyUrl(place) if "://" in place else KeyFile(Path(place))


class KeyFile:
    """Keys in a file."""

    def __init__(self, path: Path) -> None:
        self._file = ChangingFile(path, KeySet.parse, KeySetInvalid)

    async def start(self, supervisor: Supervisor) -> None:  # noqa: ARG002 - each look at the keys looks at the file
        """Reads the file."""
        await self._file.read()

    async def get(self) -> KeySet:
        """Returns the keys; looks once a second whether the file has changed."""
        return await self._file.read()

    async def refresh(self) -> KeySet:
        """Returns the keys as `get` does."""
        return await self._file.read()


class KeyUrl:
    """Keys at an https URL, fetched every five minutes, and when a token names an unknown key.

    While the URL does not answer, or answers with no JWKS, the former keys stay.
    """

    def __init__(
        self,
        url: str,
        *,
        refresh_interval_s: float = REFRESH_INTERVAL_S,
        min_fetch_interval_s: float = MIN_FETCH_INTERVAL_S,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        self._url = url
        self._refresh_interval_s = refresh_interval_s
        self._min_fetch_interval_s = min_fetch_interval_s
        self._timeout_s = timeout_s
        self._keys: KeySet | None = None
        self._fetched_at_s = -min_fetch_interval_s
        #: Whether the last fetch gave keys.
        self._is_fresh = False
        self._fetching = asyncio.Lock()

    async def start(self, supervisor: Supervisor) -> None:
        """Fetches the keys, and has them fetched again and again. A URL that does not answer is no error yet."""
        await self._fetch()
        supervisor.supervise("keys", self._keep_fresh)

    async def get(self) -> KeySet:
        """Returns the keys of the last good fetch."""
        if self._keys is None:
            raise KeysUnavailable(self._min_fetch_interval_s)
        return self._keys

    async def refresh(self) -> KeySet:
        """Fetches the keys, unless the last fetch began less than ten seconds ago, and returns them."""
        await self._fetch()
        return await self.get()

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_interval_s if self._is_fresh else self._min_fetch_interval_s)
            await self._fetch()

    async def _fetch(self) -> None:
        async with self._fetching:
            if time.monotonic() < self._fetched_at_s + self._min_fetch_interval_s:
                return
            self._fetched_at_s, self._is_fresh = time.monotonic(), False
            try:
                self._keys = await asyncio.to_thread(_download_keys, self._url, self._timeout_s)
                self._is_fresh = True
            except (OSError, ValueError, HTTPException) as error:  # the last: an answer that is no HTTP
                _log.warning(
                    "keys not fetched", url=self._url, error=str(error), has_former_keys=self._keys is not None
                )


class _ProxyHandler(request.ProxyHandler):
    """Asks the proxies of the environment, but for what is on this host."""

    def proxy_open(self, req: request.Request, proxy: str, type: str) -> Any:  # noqa: A002 - named by urllib
        return None if is_local_url(req.full_url) else super().proxy_open(req, proxy, type)


def _download_keys(url: str, timeout_s: float) -> KeySet:
    deadline_s = time.monotonic() + timeout_s
    opener = request.OpenerDirector()
    # The usual opener would follow a redirection to plaintext or to a local file.
    for handler in (
        _ProxyHandler(),
        request.HTTPSHandler(context=ssl.create_default_context()),
        request.HTTPRedirectHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    data = b""
    with opener.open(url, timeout=timeout_s) as response:
        while part := response.read1(1 << 16):
            data += part
            if len(data) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no end after {timeout_s:g} s")
    return KeySet.parse(data)
