"""Keys from an https URL: rotation, and a URL that does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
from structlog.testing import capture_logs

from edge.access.changing_file import MAX_BYTES
from edge.access.errors import KeysUnavailable, TokenInvalid
from edge.access.key_source import KeyUrl
from edge.access.token_verifier import TokenVerifier
from edge.supervision import Supervisor
from tests.hang_guard import HANG_S
from tests.servers.key_issuer import KEY, NO_HTTP, Issuer
from tests.servers.tokens import SigningKey, make_claims

Start = Callable[..., Awaitable[tuple[KeyUrl, TokenVerifier]]]


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    async with Supervisor(lambda _: None) as started:
        yield started


@pytest.fixture
def start(issuer: Issuer, supervisor: Supervisor) -> Start:
    """Starts what fetches keys, and makes what verifies tokens with them."""

    async def start(**options: float) -> tuple[KeyUrl, TokenVerifier]:
        source = KeyUrl(issuer.url, **options)
        await source.start(supervisor)
        return source, TokenVerifier(source, audience="kiln", issuer=None, clock_skew_s=30)

    return start


def sign(key: SigningKey = KEY, **claims: Any) -> str:
    return key.sign(make_claims(**claims))


async def test_an_unknown_key_is_looked_for_once_in_a_while(issuer: Issuer, start: Start) -> None:
    new, (source, verifier) = SigningKey("new"), await start(min_fetch_interval_s=2 * HANG_S)
    await verifier.verify(sign())
    issuer.publish(KEY, new)
    unknown = [sign(new, sub=str(number)) for number in range(50)]
    results = await asyncio.gather(*map(verifier.verify, unknown), return_exceptions=True)
    assert all(isinstance(result, TokenInvalid) for result in results)
    assert len(issuer.requests) == 1, "tokens of unknown keys cause no fetches"
    # The interval is over.
    source._fetched_at_s -= 2 * HANG_S
    await asyncio.gather(*map(verifier.verify, unknown))
    assert len(issuer.requests) == 2


async def test_a_withdrawn_key_is_refused_after_the_next_fetch(issuer: Issuer, start: Start) -> None:
    _, verifier = await start(refresh_interval_s=0.05, min_fetch_interval_s=0.01)
    token = sign()
    await verifier.verify(token)
    issuer.publish(SigningKey("new"))
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await verifier.verify(token)
                await asyncio.sleep(0.01)
            except TokenInvalid:
                break


async def test_a_redirection_to_plaintext_is_not_followed(issuer: Issuer, start: Start) -> None:
    forged, (_, verifier) = SigningKey("forged"), await start(min_fetch_interval_s=0.0)
    with closing(Issuer()) as plain:
        plain.publish(forged)
        issuer.status, issuer.location = 302, plain.url
        with pytest.raises(TokenInvalid):
            await verifier.verify(sign(forged))
        assert plain.requests == []


@pytest.mark.parametrize("trouble", ["closed", "error", "no http", "no keys", "too much", "slow"])
async def test_former_keys_stay_while_the_url_gives_none(issuer: Issuer, start: Start, trouble: str) -> None:
    source, verifier = await start(min_fetch_interval_s=0.0, timeout_s=HANG_S)
    match trouble:
        case "closed":
            issuer.body = None
        case "error":
            issuer.status = 503
        case "no http":
            issuer.status = NO_HTTP
        case "no keys":
            issuer.publish()
        case "too much":
            issuer.body = b" " * (MAX_BYTES + 1)
        case "slow":
            issuer.delay_s, source._timeout_s = 1.0, 0.5
    with capture_logs() as logs, pytest.raises(TokenInvalid):
        await verifier.verify(sign(SigningKey("new")))
    assert [log["event"] for log in logs] == ["keys not fetched"]
    assert logs[0]["has_former_keys"]
    assert await verifier.verify(sign(sub="bob"))


async def test_a_url_that_never_answered_asks_clients_to_come_back(issuer: Issuer, start: Start) -> None:
    issuer.status = 500
    _, verifier = await start(min_fetch_interval_s=0.05)
    with pytest.raises(KeysUnavailable) as caught:
        await verifier.verify(sign())
    assert caught.value.retry_after_s == 0.05
    issuer.status = 200
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                assert (await verifier.verify(sign())).name == "alice"
                break
            except KeysUnavailable:
                await asyncio.sleep(0.01)


async def test_an_untrusted_url_gives_no_keys(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with capture_logs() as logs:
        source, _ = await start()
    assert "CERTIFICATE_VERIFY_FAILED" in logs[0]["error"]
    with pytest.raises(KeysUnavailable):
        await source.get()


async def test_a_slow_url_does_not_hold_the_loop(issuer: Issuer, start: Start) -> None:
    """The loop lets the URL answer."""
    go_on = threading.Event()
    issuer.wait = lambda: go_on.wait(2 * HANG_S)
    starting = asyncio.create_task(start(timeout_s=HANG_S))
    async with asyncio.timeout(HANG_S / 2):
        while not issuer.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not starting.done()
    go_on.set()
    source, _ = await starting
    assert (await source.get()).keys
