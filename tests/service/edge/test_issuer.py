"""The issuer of a directory: its tokens are what servers take, its files are as private as they must be."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kiln_client.stack.issuer import SCOPES

from edge.access.errors import SigningKeyInvalid, TokenExpired, TokenInvalid
from edge.access.issuer import Issuer, main
from edge.access.key_source import KeyFile
from edge.access.principal import Principal, Scope
from edge.access.token_verifier import TokenVerifier


async def verify(directory: Path, token: str, *, audience: str = "kiln") -> Principal:
    """Who a server takes the bearer for, whose `--auth-jwks` is the directory's."""
    keys = KeyFile(directory / "jwks.json")
    await keys.start()
    return await TokenVerifier(keys, audience=audience, issuer=None, clock_skew_s=1).verify(token)


def issue(directory: Path, *words: str) -> str:
    """The token of a file, which the command has written."""
    out = directory.parent / "token"
    assert main([str(directory), "--out", str(out), *words]) == 0
    return out.read_text().strip()


async def test_a_server_takes_what_the_issuer_says(tmp_path: Path) -> None:
    plain = issue(tmp_path / "auth", "--subject", "ada", "--scope", "infer", "--scope", "load")
    assert await verify(tmp_path / "auth", plain) == Principal("ada", frozenset({Scope.INFER, Scope.LOAD}))
    patterns = ("--deployment", "chat-*", "--deployment", "d", "--alias", "*@staging")
    bound = issue(tmp_path / "auth", "--subject", "ci", "--scope", "promote", *patterns)
    assert await verify(tmp_path / "auth", bound) == Principal(
        "ci", frozenset({Scope.PROMOTE}), deployments=("chat-*", "d"), aliases=("*@staging",)
    )


async def test_tokens_end_and_are_for_one_audience(tmp_path: Path) -> None:
    old = issue(tmp_path / "auth", "--subject", "ada", "--scope", "infer", "--lifetime", "-5")
    with pytest.raises(TokenExpired):
        await verify(tmp_path / "auth", old)
    other = issue(tmp_path / "auth", "--subject", "ada", "--scope", "infer", "--audience", "others")
    with pytest.raises(TokenInvalid):
        await verify(tmp_path / "auth", other)
    assert (await verify(tmp_path / "auth", other, audience="others")).name == "ada"


async def test_a_key_is_kept_and_a_removed_one_revokes_its_tokens(tmp_path: Path) -> None:
    words = ("--subject", "ada", "--scope", "infer")
    first = issue(tmp_path / "auth", *words)
    issue(tmp_path / "auth", *words)
    assert (await verify(tmp_path / "auth", first)).name == "ada"
    (tmp_path / "auth" / "key.pem").unlink()
    issue(tmp_path / "auth", *words)
    with pytest.raises(TokenInvalid):
        await verify(tmp_path / "auth", first)


@pytest.mark.parametrize("umask", [0o022, 0o000], ids=oct)
def test_only_the_public_keys_are_for_others(tmp_path: Path, umask: int) -> None:
    former = os.umask(umask)
    try:
        issue(tmp_path / "auth", "--subject", "ada", "--scope", "infer")
    finally:
        os.umask(former)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "auth").iterdir()}
    assert found == {"key.pem": 0o600, "jwks.json": 0o644}
    assert stat.S_IMODE((tmp_path / "auth").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert "d" not in jwt.PyJWKSet.from_json((tmp_path / "auth" / "jwks.json").read_text()).keys[0]._jwk_data


async def test_issuers_that_start_at_once_share_a_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        issuers = list(threads.map(lambda _: Issuer(tmp_path / "auth"), range(8)))
    for issuer in issuers:
        token = issuer.sign({"sub": "ada", "aud": "kiln", "exp": 2**33, "scope": "infer"})
        assert (await verify(tmp_path / "auth", token)).name == "ada"
    assert {path.name for path in (tmp_path / "auth").iterdir()} == {"key.pem", "jwks.json"}


def test_an_api_key_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "api-key"
    words = ("--subject", "ada", "--scope", "infer", "--api-key", str(path))
    issue(tmp_path / "auth", *words)
    key = path.read_text()
    assert len(key.strip()) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    issue(tmp_path / "auth", *words)
    assert path.read_text() == key


def test_the_token_is_printed_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--subject", "ada", "--scope", "admin"]) == 0
    claims = jwt.decode(capsys.readouterr().out.strip(), options={"verify_signature": False})
    assert claims.keys() == {"sub", "aud", "exp", "scope"}


EC_KEY = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)


@pytest.mark.parametrize("data", [b"", b"no key", EC_KEY], ids=["empty", "text", "another kind"])
def test_a_file_that_is_no_key_is_named(tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key.pem").write_bytes(data)
    with pytest.raises(SigningKeyInvalid, match=r"key\.pem"):
        Issuer(tmp_path)
    assert main([str(tmp_path), "--subject", "ada", "--scope", "infer"]) == 1
    assert "key.pem" in capsys.readouterr().err
    assert (tmp_path / "key.pem").read_bytes() == data


def test_the_client_knows_the_scopes_of_the_services() -> None:
    assert tuple(scope.value for scope in Scope) == SCOPES
