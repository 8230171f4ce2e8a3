"""Principals by their certificates, over mutual TLS."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from compiler_svc.api.access_rules import RULES
from edge.access import changing_file
from edge.access.config import AccessConfig
from edge.config import EdgeConfig, TlsConfig
from tests.servers.answers import reason_of
from tests.servers.authority import Authority
from tests.servers.logs import Logs, finished_calls
from tests.servers.probe import GET, READ, Probe, check_health, serve, stub
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks

IDENTITIES = """
identities:
  - uri: spiffe://example.org/runtime
    scopes: [load]
  - dns: gateway
    scopes: [infer]
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serve_tls(authority: Authority, access: AccessConfig, files: tuple[Path, Path]) -> Any:
    """Serves a probe that asks clients for certificates and calls for principals; yields a client's channel."""
    config = EdgeConfig("127.0.0.1:0", tls=TlsConfig(*authority.issue("server"), authority.path), access=access)

    def connect(address: str) -> grpc.aio.Channel:
        certificate, key = (path.read_bytes() for path in files)
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes(), key, certificate)
        return grpc.aio.secure_channel(address, credentials)

    return serve(Probe(), config, connect=connect, rules=RULES)


def fingerprint(files: tuple[Path, Path]) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(files[0].read_text())).hexdigest()


async def refusal_of(call: Any) -> str:
    """Why a call is refused; empty if it is not."""
    try:
        _ = [one async for one in call] if hasattr(call, "__aiter__") else await call
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}/{reason_of(error)}"
    return ""


def audit(logs: Logs) -> Logs:
    return [log for log in logs if log["event"] in {"refused", "allowed"}]


async def test_names_in_certificates_stand_for_principals(tmp_path: Path, authority: Authority, logs: Logs) -> None:
    path = tmp_path / "identities.yaml"
    path.write_text(IDENTITIES)
    runtime = authority.issue("host-1", "spiffe://example.org/runtime")
    gateway, stranger = authority.issue("gateway"), authority.issue("stranger", "spiffe://example.org/other")
    for files, get, read in (
        (runtime, "", ""),
        (gateway, "", "PERMISSION_DENIED/SCOPE_MISSING"),
        (stranger, "UNAUTHENTICATED/TOKEN_MISSING", "UNAUTHENTICATED/TOKEN_MISSING"),
    ):
        async with serve_tls(authority, AccessConfig(identities=path, is_required=True), files) as channel:
            assert await refusal_of(stub(channel).GetBundle(GET)) == get
            assert await refusal_of(stub(channel).ReadBlob(READ)) == read
            await check_health(channel)
    refused = [(line["principal"], line["reason"]) for line in audit(logs)]
    assert refused == [("dns:gateway", "SCOPE_MISSING"), *[("anonymous", "TOKEN_MISSING")] * 2]


async def test_a_revoked_certificate_is_refused_from_then_on(
    tmp_path: Path, authority: Authority, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing_file, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "identities.yaml"
    path.write_text(IDENTITIES)
    gateway = authority.issue("gateway")
    async with serve_tls(authority, AccessConfig(identities=path), gateway) as channel:
        assert await refusal_of(stub(channel).GetBundle(GET)) == ""
        path.write_text(f"{IDENTITIES}\ndenied_fingerprints: ['{fingerprint(gateway).upper()}']")
        assert await refusal_of(stub(channel).GetBundle(GET)) == "UNAUTHENTICATED/CERTIFICATE_REVOKED"
        # A token does not make up for it.
        token = bearer(SigningKey().sign(make_claims()))
        assert await refusal_of(stub(channel).ReadBlob(READ, metadata=token)) == "UNAUTHENTICATED/CERTIFICATE_REVOKED"
        # A mistake in the file gives no one back what it took.
        path.write_text("identities: [")
        assert await refusal_of(stub(channel).GetBundle(GET)) == "UNAUTHENTICATED/CERTIFICATE_REVOKED"
    assert [line["reason"] for line in audit(logs)] == ["CERTIFICATE_REVOKED"] * 3
    assert [log["event"] for log in logs].count("former content kept") == 1


async def test_without_identities_a_certificate_of_the_authority_may_do_everything(
    tmp_path: Path, authority: Authority, logs: Logs
) -> None:
    denied, client = authority.issue("denied"), authority.issue("client")
    path = tmp_path / "identities.yaml"
    path.write_text(f"denied_fingerprints: [{fingerprint(denied)}]")
    for access in (AccessConfig(is_required=True), AccessConfig(is_required=True, identities=path)):
        async with serve_tls(authority, access, client) as channel:
            assert await refusal_of(stub(channel).ReadBlob(READ)) == ""
            assert (await finished_calls(logs))[-1]["principal"] == "common_name:client"
    async with serve_tls(authority, access, denied) as channel:
        assert await refusal_of(stub(channel).ReadBlob(READ)) == "UNAUTHENTICATED/CERTIFICATE_REVOKED"


async def test_with_keys_only_listed_certificates_are_principals(tmp_path: Path, authority: Authority) -> None:
    key, path = SigningKey(), tmp_path / "identities.yaml"
    path.write_text(IDENTITIES)
    jwks = str(write_jwks(tmp_path / "jwks.json", [key]))
    gateway = authority.issue("gateway")
    token = bearer(key.sign(make_claims("load")))
    for identities, without_token in ((None, "UNAUTHENTICATED/TOKEN_MISSING"), (path, "")):
        access = AccessConfig(jwks=jwks, identities=identities, is_required=True)
        async with serve_tls(authority, access, gateway) as channel:
            assert await refusal_of(stub(channel).GetBundle(GET)) == without_token
            # The token counts, not the certificate beside it.
            assert await refusal_of(stub(channel).ReadBlob(READ, metadata=token)) == ""
