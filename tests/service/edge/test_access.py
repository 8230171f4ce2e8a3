"""Who may call what, over real gRPC: each refusal has its code and one audit line, and names no token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc
from structlog.testing import capture_logs

from compiler_svc.api.access_rules import RULES
from edge.access import changing_file
from edge.access.config import AccessConfig
from edge.access.errors import KeySetInvalid
from edge.access.principal import Principal, Scope
from edge.access.rules import Rules
from edge.config import EdgeConfig, LocalListener
from edge.server import EdgeServer
from edge.status import BUNDLE_STATUSES
from tests.hang_guard import HANG_S
from tests.servers.probe import GET, READ, SERVICE, Probe, check_health, make_server, stub
from tests.servers.probe import serve as serve_open
from tests.servers.runtime import details_of
from tests.servers.tokens import (
    SigningKey,
    bearer,
    encode_hs256,
    encode_unsigned,
    make_claims,
    write_jwks,
)
from tests.unit.edge.test_status import detail

Logs = list[dict[str, Any]]

KEY, RSA_KEY = SigningKey(), SigningKey("rsa", "RS256")
SET_ALIAS = bundle_pb2.SetAliasRequest(ref="tiny:v1", alias="prod")


class Promoter(Probe):
    """A probe whose aliases can be moved."""

    async def SetAlias(  # noqa: N802
        self, request: bundle_pb2.SetAliasRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> bundle_pb2.SetAliasResponse:
        self.entered.set()
        return bundle_pb2.SetAliasResponse()


@pytest.fixture
def logs() -> Iterator[Logs]:
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured


@asynccontextmanager
async def serve_counted(folder: Path, probe: Probe, *, rules: Rules = RULES, **options: Any) -> Any:
    """Serves a probe that verifies tokens; yields a channel to it, and the server."""
    access = AccessConfig(jwks=str(write_jwks(folder / "jwks.json", [KEY, RSA_KEY])), **options)
    server = EdgeServer(
        EdgeConfig("127.0.0.1:0", drain_timeout_s=5, access=access),
        status_table=BUNDLE_STATUSES,
        services=[SERVICE],
        register=lambda grpc_server: bundle_pb2_grpc.add_BundleServiceServicer_to_server(probe, grpc_server),
        rules=rules,
    )
    try:
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, server
    finally:
        await server.drain()


@asynccontextmanager
async def serve(folder: Path, probe: Probe, **options: Any) -> Any:
    """Serves a probe that verifies tokens; yields a channel to it."""
    async with serve_counted(folder, probe, **options) as (channel, _):
        yield channel


def sign(scope: str = "load promote", **claims: Any) -> str:
    return KEY.sign(make_claims(scope, **claims))


def audit(logs: Logs) -> Logs:
    return [log for log in logs if log["event"] in {"refused", "allowed"}]


async def call(channel: grpc.aio.Channel, method: str, token: str | None) -> None:
    metadata = () if token is None else bearer(token)
    if method == "ReadBlob":
        assert [part async for part in stub(channel).ReadBlob(READ, metadata=metadata)]
    elif method == "SetAlias":
        await stub(channel).SetAlias(SET_ALIAS, metadata=metadata)
    else:
        await stub(channel).GetBundle(GET, metadata=metadata)


UNAUTHENTICATED, DENIED = "UNAUTHENTICATED", "PERMISSION_DENIED"
#: Name → token, method, code and reason.
REFUSALS: dict[str, tuple[Callable[[], str | None], str, str, str]] = {
    "without token": (lambda: None, "GetBundle", UNAUTHENTICATED, "TOKEN_MISSING"),
    "without token, a stream": (lambda: None, "ReadBlob", UNAUTHENTICATED, "TOKEN_MISSING"),
    "expired": (lambda: sign(lifetime_s=-60), "GetBundle", UNAUTHENTICATED, "TOKEN_EXPIRED"),
    "expired, a stream": (lambda: sign(lifetime_s=-60), "ReadBlob", UNAUTHENTICATED, "TOKEN_EXPIRED"),
    "not yet valid": (lambda: sign(nbf=2**40), "GetBundle", UNAUTHENTICATED, "TOKEN_INVALID"),
    "wrong audience": (lambda: sign(aud="other"), "GetBundle", UNAUTHENTICATED, "TOKEN_INVALID"),
    "wrong issuer": (lambda: sign(iss="other"), "GetBundle", UNAUTHENTICATED, "TOKEN_INVALID"),
    "algorithm none": (lambda: encode_unsigned(make_claims()), "GetBundle", UNAUTHENTICATED, "TOKEN_INVALID"),
    "public key as a secret": (
        lambda: encode_hs256(make_claims(), RSA_KEY.public_pem(), "rsa"),
        "GetBundle",
        UNAUTHENTICATED,
        "TOKEN_INVALID",
    ),
    "unknown key": (
        lambda: SigningKey("unknown").sign(make_claims()),
        "GetBundle",
        UNAUTHENTICATED,
        "TOKEN_INVALID",
    ),
    "signed by another": (lambda: SigningKey().sign(make_claims()), "GetBundle", UNAUTHENTICATED, "TOKEN_INVALID"),
    "not a token": (lambda: "hello", "GetBundle", UNAUTHENTICATED, "TOKEN_INVALID"),
    "wrong scope": (lambda: sign("infer promote"), "ReadBlob", DENIED, "SCOPE_MISSING"),
    "no scope": (lambda: sign(""), "GetBundle", DENIED, "SCOPE_MISSING"),
    "wrong alias": (lambda: sign(kiln_aliases=["*@staging"]), "SetAlias", DENIED, "ALIAS_FORBIDDEN"),
    "no alias": (lambda: sign(kiln_aliases=[]), "SetAlias", DENIED, "ALIAS_FORBIDDEN"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
async def test_refused(tmp_path: Path, logs: Logs, case: str) -> None:
    make_token, method, code, reason = REFUSALS[case]
    token, probe = make_token(), Promoter()
    async with serve(tmp_path, probe, is_required=True, issuer="us" if case == "wrong issuer" else None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, token)
    info, _ = details_of(caught.value)
    assert (caught.value.code().name, info.reason) == (code, reason)
    assert not probe.entered.is_set()
    (line,) = audit(logs)
    assert (line["event"], line["log_level"], line["reason"]) == ("refused", "warning", reason)
    assert line["method"] == f"/{SERVICE}/{method}"
    assert line["principal"] == ("alice" if code == DENIED else "anonymous")
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert len(line["request_id"]) == 32
    everything = f"{logs}{caught.value!r}{caught.value.trailing_metadata()}"
    assert token is None or token not in everything
    assert token is None or token.rpartition(".")[2] not in everything.split()


async def test_refusals_name_what_would_do(tmp_path: Path, logs: Logs) -> None:
    async with serve(tmp_path, Promoter(), is_required=True) as channel:
        for method, token, metadata in (
            ("ReadBlob", sign("infer"), {"principal": "alice", "scope": "compile or load"}),
            ("SetAlias", sign(kiln_aliases=[]), {"principal": "alice", "alias": "tiny@prod"}),
            ("GetBundle", None, {"accepted": "`authorization: Bearer JWT`"}),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, method, token)
            assert dict(details_of(caught.value)[0].metadata) == metadata
    assert [line.get("alias") for line in audit(logs)] == [None, "tiny@prod", None]
    assert [line.get("scope") for line in audit(logs)] == ["compile or load", None, None]


async def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    async with serve_counted(tmp_path, Promoter(), is_required=True) as (channel, server):
        (row,) = (row for row in server.list_metrics() if row.name == "kiln:access_refusals")
        for token in (None, sign(lifetime_s=-60), sign(lifetime_s=-60), sign("infer")):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(channel, "ReadBlob", token)
        await call(channel, "ReadBlob", sign())
    assert dict(row.read()) == {("TOKEN_MISSING",): 1, ("TOKEN_EXPIRED",): 2, ("SCOPE_MISSING",): 1}


async def test_allowed_changes_have_one_audit_line_and_reads_none(tmp_path: Path, logs: Logs) -> None:
    token = sign(kiln_aliases=["tiny@*"])
    async with serve(tmp_path, Promoter(), is_required=True) as channel:
        for method in ("GetBundle", "ReadBlob", "SetAlias"):
            await call(channel, method, token)
    (line,) = audit(logs)
    assert (line["event"], line["log_level"], line["principal"], line["alias"]) == (
        "allowed",
        "info",
        "alice",
        "tiny@prod",
    )
    assert [log["principal"] for log in logs if log["event"] == "call"] == ["alice"] * 3


async def test_on_loopback_no_token_is_needed_but_one_that_is_shown_is_verified(tmp_path: Path, logs: Logs) -> None:
    async with serve(tmp_path, Promoter()) as channel:
        await call(channel, "SetAlias", None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "GetBundle", sign(lifetime_s=-60))
        assert details_of(caught.value)[0].reason == "TOKEN_EXPIRED"
    assert [line["principal"] for line in audit(logs) if line["event"] == "allowed"] == ["anonymous"]


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Basic YWxpY2U6c2VjcmV0"),),
        (("authorization", "Bearer"),),
        (("authorization", ""),),
        (*bearer(sign()), *bearer(sign())),
    ],
)
async def test_only_one_bearer_token_is_taken(tmp_path: Path, metadata: Any) -> None:
    async with serve(tmp_path, Probe()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).GetBundle(GET, metadata=metadata)
    assert details_of(caught.value)[0].reason == "TOKEN_INVALID"


async def test_a_server_without_keys_looks_at_no_token(logs: Logs) -> None:
    async with serve_open(Probe()) as channel:
        await stub(channel).GetBundle(GET, metadata=bearer("hello"))
    assert audit(logs) == []


async def test_a_rotated_key_is_refused(tmp_path: Path, logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing_file, "CHECK_INTERVAL_S", 0.0)
    new = SigningKey("new")
    async with serve(tmp_path, Probe(), is_required=True) as channel:
        await call(channel, "GetBundle", sign())
        write_jwks(tmp_path / "jwks.json", [new])
        await call(channel, "GetBundle", new.sign(make_claims()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "GetBundle", sign())
    assert (caught.value.code().name, details_of(caught.value)[0].reason) == (UNAUTHENTICATED, "TOKEN_INVALID")
    assert len(audit(logs)) == 1


async def test_a_server_does_not_start_without_valid_keys(tmp_path: Path) -> None:
    config = EdgeConfig("127.0.0.1:0", access=AccessConfig(jwks=str(tmp_path / "absent")))
    server = EdgeServer(config, status_table={}, services=[], register=lambda _: None)
    with pytest.raises(KeySetInvalid, match="absent: No such file"):
        await server.start()
    await server.drain()


async def test_health_and_reflection_need_no_token(tmp_path: Path, logs: Logs) -> None:
    async with serve(tmp_path, Probe(), is_required=True) as channel:
        for name in ("", "liveness", SERVICE):
            assert await check_health(channel, name) == health_pb2.HealthCheckResponse.SERVING
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests)
        assert (await anext(aiter(listed))).list_services_response.service
    assert audit(logs) == []


async def test_reflection_can_be_switched_off() -> None:
    server = EdgeServer(
        EdgeConfig("127.0.0.1:0", reflection=False), status_table={}, services=[], register=lambda _: None
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
            # Sends no request: the client could not tell one that fails to be sent from the refusal.
            refused = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            assert await refused.code() is grpc.StatusCode.UNIMPLEMENTED
            assert await check_health(channel) == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.drain()


async def test_a_method_without_a_rule_needs_the_scope_admin(tmp_path: Path) -> None:
    async with serve(tmp_path, Probe(), rules={}, is_required=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "GetBundle", sign("infer load compile promote"))
        assert details_of(caught.value)[0].metadata["scope"] == "admin"
        await call(channel, "GetBundle", sign("admin"))


async def test_a_request_is_decoded_after_its_caller_is_known(tmp_path: Path) -> None:
    async with serve(tmp_path, Probe(), is_required=True) as channel:
        malformed = channel.unary_unary(f"/{SERVICE}/GetBundle")
        for metadata, reason in (((), "TOKEN_MISSING"), (bearer(sign()), "REQUEST_MALFORMED")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await malformed(b"\xff\xff", metadata=metadata)
            assert details_of(caught.value)[0].reason == reason


async def test_streams_of_one_principal_are_bounded(tmp_path: Path, logs: Logs) -> None:
    probe = Probe()
    probe.answer = probe.hang
    async with serve(tmp_path, probe, max_streams=2) as channel:
        held = []
        for subject in ("alice", "alice", "bob", None, None, None):
            stream = stub(channel).ReadBlob(READ, metadata=bearer(sign(sub=subject)) if subject else ())
            await anext(aiter(stream))
            held.append(stream)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "ReadBlob", sign())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        info, _ = details_of(caught.value)
        assert (info.reason, info.metadata["principal"]) == ("PRINCIPAL_BUSY", "alice")
        status = rpc_status.from_call(caught.value)
        assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToSeconds() == 1
        held[0].cancel()
        async with asyncio.timeout(HANG_S):
            while True:
                stream = stub(channel).ReadBlob(READ, metadata=bearer(sign()))
                try:
                    await anext(aiter(stream))
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
        for one in (*held, stream):
            one.cancel()
    assert audit(logs)[0]["reason"] == "PRINCIPAL_BUSY"


async def test_a_local_listener_is_for_programs_of_this_host(tmp_path: Path) -> None:
    """Whatever its address: gRPC itself closes other connections."""
    elsewhere = find_other_address()
    listener = LocalListener("0.0.0.0:0", Principal("program", frozenset({Scope.LOAD})))
    access = AccessConfig(jwks=str(write_jwks(tmp_path / "jwks.json", [KEY])), is_required=True)
    config = EdgeConfig("127.0.0.1:0", access=access, local_listener=listener, allow_insecure=True)
    server = make_server(Probe(), config, rules=RULES)
    try:
        await server.start()
        for host, code in (("127.0.0.1", None), (elsewhere, grpc.StatusCode.UNAVAILABLE)):
            async with grpc.aio.insecure_channel(f"{host}:{server.local_port}") as channel:
                answer = stub(channel).GetBundle(GET, timeout=HANG_S)
                assert await answer.code() is (code or grpc.StatusCode.OK)
    finally:
        await server.drain()


def find_other_address() -> str:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        return str(probe.getsockname()[0])
