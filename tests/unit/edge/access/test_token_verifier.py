import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from edge.access import changing_file, token_verifier
from edge.access.errors import KeySetInvalid, TokenExpired, TokenInvalid
from edge.access.key_source import KeyFile
from edge.access.principal import Principal, Scope
from edge.access.token_verifier import TokenVerifier
from tests.servers.tokens import KEY_MAKERS, SigningKey, encode_hs256, encode_unsigned, make_claims, write_jwks

KEY = SigningKey()
KEYS = {"EdDSA": KEY, **{algorithm: SigningKey(algorithm, algorithm) for algorithm in ("ES256", "RS256")}}


def make_verifier(folder: Path, *keys: SigningKey, **options: Any) -> TokenVerifier:
    path = write_jwks(folder / "jwks.json", keys or [KEY])
    return TokenVerifier(KeyFile(path), **{"audience": "kiln", "issuer": None, "clock_skew_s": 30.0, **options})


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at with every call."""
    monkeypatch.setattr(changing_file, "CHECK_INTERVAL_S", 0.0)


@pytest.mark.parametrize("algorithm", list(KEY_MAKERS))
async def test_a_token_names_a_principal(tmp_path: Path, algorithm: str) -> None:
    verifier = make_verifier(tmp_path, *KEYS.values())
    claims = make_claims(
        "openid infer load", kiln_deployments=["chat-*"], kiln_aliases=[], kiln_bundles=["b*"], aud=["other", "kiln"]
    )
    principal = await verifier.verify(KEYS[algorithm].sign(claims))
    assert principal == Principal("alice", frozenset({Scope.INFER, Scope.LOAD}), ("chat-*",), (), ("b*",))


async def test_a_plain_token_may_do_nothing_to_everything(tmp_path: Path) -> None:
    principal = await make_verifier(tmp_path).verify(KEY.sign(make_claims("")))
    assert principal == Principal("alice", frozenset(), None, None, None)


async def test_the_issuer_is_held_against_the_option(tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path, issuer="https://issuer.example")
    assert await verifier.verify(KEY.sign(make_claims(iss="https://issuer.example")))
    for other in ("https://other.example", None):
        with pytest.raises(TokenInvalid, match=r"another issuer|`iss`"):
            await verifier.verify(KEY.sign(make_claims(iss=other)))


@pytest.mark.parametrize(
    ("claims", "detail"),
    [
        ({"aud": "other"}, "another audience"),
        ({"aud": None}, "no claim `aud`"),
        ({"exp": None}, "no claim `exp`"),
        ({"exp": "soon"}, "no well-formed JWT"),
        ({"exp": float("inf")}, "no well-formed JWT"),
        ({"sub": None}, "no claim `sub`"),
        ({"sub": ""}, "claim `sub` has not 1 to 256 characters"),
        ({"sub": "a" * 257}, "claim `sub` has not 1 to 256 characters"),
        ({"nbf": int(time.time()) + 3600}, "its time has not come yet"),
        ({"scope": ["infer"]}, "claim `scope` is no text"),
        ({"kiln_deployments": "chat-*"}, "claim `kiln_deployments` is no list"),
        ({"kiln_aliases": [1]}, "claim `kiln_aliases` is no list"),
        ({"kiln_bundles": "b"}, "claim `kiln_bundles` is no list"),
    ],
)
async def test_claims_that_do_not_fit_are_named(tmp_path: Path, claims: dict[str, Any], detail: str) -> None:
    with pytest.raises(TokenInvalid, match=detail):
        await make_verifier(tmp_path).verify(KEY.sign(make_claims(**claims)))


async def test_a_null_pattern_list_is_not_every_pattern(tmp_path: Path) -> None:
    with pytest.raises(TokenInvalid, match="kiln_deployments"):
        await make_verifier(tmp_path).verify(KEY.sign(make_claims() | {"kiln_deployments": None}))


def forgeries() -> dict[str, tuple[str, str]]:
    claims, other = make_claims(), SigningKey()
    head, body, signature = KEY.sign(claims).split(".")
    return {
        "unsigned": (encode_unsigned(claims), "none of EdDSA, ES256, RS256"),
        "public key as a secret": (encode_hs256(claims, KEYS["RS256"].public_pem()), "none of EdDSA, ES256, RS256"),
        "key of another algorithm": (KEYS["ES256"].sign(claims, kid="first"), "no key of its `kid` and `alg`"),
        "unknown key": (SigningKey("second").sign(claims), "no key of its `kid` and `alg`"),
        "no key named, several there": (KEY.sign(claims, kid=None), "no key of its `kid` and `alg`"),
        "another key of that name": (other.sign(claims), "its signature is not"),
        "changed": (f"{head}.{KEY.sign(make_claims(sub='bob')).split('.')[1]}.{signature}", "its signature is not"),
        "no signature": (f"{head}.{body}.", "its signature is not"),
        "critical extension": (KEY.sign(claims, crit=["exp"], exp=1), "no well-formed JWT"),
        "no token": ("one", "no well-formed JWT"),
        "half a token": (f"{head}.{body}", "no well-formed JWT"),
        "nested": (f"{'W1t' * 1000}.{body}.{signature}", "no well-formed JWT"),
    }


FORGERIES = forgeries()


@pytest.mark.parametrize("forgery", list(FORGERIES))
async def test_forged_tokens_are_refused(tmp_path: Path, forgery: str) -> None:
    token, detail = FORGERIES[forgery]
    verifier = make_verifier(tmp_path, KEY, SigningKey("other"), KEYS["RS256"], KEYS["ES256"])
    with pytest.raises(TokenInvalid, match=detail) as caught:
        await verifier.verify(token)
    assert token not in f"{caught.value}{caught.value.metadata}"


async def test_an_expired_token_is_told_apart(tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path, clock_skew_s=30.0)
    assert await verifier.verify(KEY.sign(make_claims(lifetime_s=-20)))
    with pytest.raises(TokenExpired):
        await verifier.verify(KEY.sign(make_claims(lifetime_s=-40)))


async def test_a_remembered_token_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = make_verifier(tmp_path, clock_skew_s=1.0)
    token = KEY.sign(make_claims(lifetime_s=100))
    first = await verifier.verify(token)
    assert await verifier.verify(token) is first, "it was remembered"
    later_s = time.time() + 102
    monkeypatch.setattr(token_verifier.time, "time", lambda: later_s)
    with monkeypatch.context() as patch:
        patch.setattr(token_verifier.jwt, "decode", lambda *_, **__: pytest.fail("verified anew"))
        with pytest.raises(pytest.fail.Exception):
            await verifier.verify(token)


async def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_verifier, "MAX_CACHED", 2)
    verifier = make_verifier(tmp_path)
    for number in range(4):
        await verifier.verify(KEY.sign(make_claims(sub=str(number))))
    assert len(verifier._verified) == 2


@pytest.mark.usefixtures("watchful")
async def test_keys_rotate_and_take_their_tokens_with_them(tmp_path: Path) -> None:
    old, new = SigningKey("old"), SigningKey("new")
    verifier = make_verifier(tmp_path, old)
    old_token, new_token = old.sign(make_claims()), new.sign(make_claims())
    await verifier.verify(old_token)
    with pytest.raises(TokenInvalid):
        await verifier.verify(new_token)
    write_jwks(tmp_path / "jwks.json", [old, new])
    assert await verifier.verify(new_token)
    assert await verifier.verify(old_token)
    write_jwks(tmp_path / "jwks.json", [new])
    assert await verifier.verify(new_token)
    with pytest.raises(TokenInvalid, match="no key"):
        await verifier.verify(old_token)


@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("broken", ["", '{"keys": []}', None])
async def test_keys_stay_if_their_file_breaks(tmp_path: Path, broken: str | None) -> None:
    verifier = make_verifier(tmp_path)
    token = KEY.sign(make_claims())
    await verifier.verify(token)
    path = tmp_path / "jwks.json"
    path.unlink() if broken is None else path.write_text(broken)
    assert await verifier.verify(token)
    assert await verifier.verify(KEY.sign(make_claims(sub="bob")))


async def test_a_changed_file_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    real_stat = os.stat
    monkeypatch.setattr(changing_file.os, "stat", lambda path: looks.append(path) or real_stat(path))
    source = KeyFile(write_jwks(tmp_path / "jwks.json", [KEY]))
    await asyncio.gather(*(source.get() for _ in range(100)))
    for _ in range(100):
        await source.get()
    assert len(looks) == 1


@pytest.mark.parametrize("content", [None, "", '{"keys": []}', "x" * (changing_file.MAX_BYTES + 1)])
async def test_keys_that_were_never_there_are_an_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "jwks.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(KeySetInvalid, match=str(path)):
        await KeyFile(path).get()
