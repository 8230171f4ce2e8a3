"""`kiln token`: tokens signed with the key of a home."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import jwt
import pytest
from kiln_client.errors import KilnError
from kiln_client.stack import issuer
from kiln_client.stack.issuer import HOME_GRANT, keep_home_token, renew_home_token, sign_token, token_path

from tests.hang_guard import HANG_S
from tests.service.clients.conftest import Kiln


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose services have started once."""
    asyncio.run(renew_home_token(tmp_path))
    return tmp_path


def claims_of(token: str) -> dict[str, object]:
    claims: dict[str, object] = jwt.decode(token, options={"verify_signature": False})
    return claims


def test_for_a_person_the_token_alone_is_printed(kiln: Kiln, home: Path) -> None:
    words = ("--scope", "infer", "--deployment", "chat-*", "--lifetime", "12h", "--subject", "ada")
    outcome = kiln("token", "--home", home, *words)
    claims = claims_of(outcome.out.strip())
    expires = claims.pop("exp")
    assert isinstance(expires, int)
    assert expires == pytest.approx(time.time() + 12 * 3600, abs=30)
    assert claims == {"sub": "ada", "aud": "kiln", "scope": "infer", "kiln_deployments": ["chat-*"]}
    assert "ada may infer until" in outcome.err


def test_for_a_program(kiln: Kiln, home: Path) -> None:
    words = ("--scope", "load", "--scope", "promote", "--alias", "*@prod", "--bundle", "a*")
    outcome = kiln("token", "--home", home, *words, "--json")
    record = outcome.last
    claims = claims_of(record.pop("token"))
    assert (claims["scope"], claims["kiln_aliases"], claims["kiln_bundles"]) == ("load promote", ["*@prod"], ["a*"])
    assert record.pop("expire_time").endswith("Z")
    assert record.pop("subject")
    scopes = ["load", "promote"]
    assert record == {"file": None, "scopes": scopes, "deployments": None, "aliases": ["*@prod"], "bundles": ["a*"]}


def test_into_a_file(kiln: Kiln, home: Path, tmp_path: Path) -> None:
    outcome = kiln("token", "--home", home, "--scope", "infer", "--out", tmp_path / "mine", "--json")
    assert (outcome.last["token"], outcome.last["file"]) == (None, str(tmp_path / "mine"))
    assert claims_of((tmp_path / "mine").read_text().strip())["scope"] == "infer"
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o600


def test_a_home_without_a_key(kiln: Kiln, tmp_path: Path) -> None:
    error = kiln("token", "--home", tmp_path / "none", "--scope", "infer", "--json").error
    assert (error["code"], error["reason"]) == ("NOT_FOUND", "KEY_NOT_FOUND")
    assert not (tmp_path / "none").exists()


def test_a_scope_is_needed(kiln: Kiln, home: Path) -> None:
    assert kiln("token", "--home", home).exit_code == 2
    assert kiln("token", "--home", home, "--scope", "all").exit_code == 2


def test_a_key_that_is_none_is_named(kiln: Kiln, home: Path) -> None:
    (home / "auth" / "key.pem").write_text("no key")
    error = kiln("token", "--home", home, "--scope", "infer", "--json").error
    assert (error["code"], error["reason"]) == ("FAILED_PRECONDITION", "TOKEN_NOT_MADE")
    assert str(home / "auth" / "key.pem") in error["message"]


async def test_a_directory_of_the_caller_is_not_the_issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edge" / "access").mkdir(parents=True)
    (tmp_path / "edge" / "access" / "issuer.py").write_text("raise SystemExit('not the issuer')")
    monkeypatch.chdir(tmp_path)
    assert await sign_token(tmp_path / "home", HOME_GRANT)


async def test_the_token_of_a_home_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in between, such as a full disk, is passed over."""
    renewed: list[Path] = []
    is_enough = asyncio.Event()

    async def renew(home: Path) -> None:
        renewed.append(home)
        if len(renewed) == 3:
            is_enough.set()
        if len(renewed) == 1:
            raise KilnError("no space left on device")

    monkeypatch.setattr(issuer, "renew_home_token", renew)
    monkeypatch.setattr(issuer, "_POLL_S", 0.01)
    keeping = asyncio.create_task(keep_home_token(tmp_path))
    await asyncio.sleep(0.05)
    assert renewed == []
    monkeypatch.setattr(issuer, "HOME_TOKEN_RENEWAL_S", 0.02)
    await asyncio.wait_for(is_enough.wait(), HANG_S)
    assert not keeping.done()
    keeping.cancel()


def test_the_token_of_a_home_has_every_scope(home: Path) -> None:
    assert claims_of(token_path(home).read_text().strip())["scope"] == "infer load compile read promote admin"
    assert stat.S_IMODE(token_path(home).stat().st_mode) == 0o600
