"""Who may call what, over real gRPC: each refusal has its code and one audit line, and names no token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kiln.bundle.v1 import bundle_pb2

from compiler_svc.api.access_rules import RULES
from edge.access.config import AccessConfig
from edge.access.errors import KeySetInvalid
from edge.access.principal import Principal, Scope
from edge.access.rules import Rules
from edge.config import EdgeConfig, LocalListener
from tests.hang_guard import HANG_S
from tests.servers.answers import reason_of
from tests.servers.logs import Logs
from tests.servers.probe import GET, READ, SERVICE, SERVING, Probe, check_health, hang, own_channel, stub
from tests.servers.probe import serve as serve_open
from tests.servers.refusals import refusal, refused
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks

KEY = SigningKey()
SET_ALIAS = bundle_pb2.SetAliasRequest(ref="tiny:v1", alias="prod")


class Promoter(Probe):
    """A probe whose aliases can be moved."""

    async def SetAlias(  # noqa: N802
        self, request: bundle_pb2.SetAliasRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> bundle_pb2.SetAliasResponse:
        self.entered.set()
        return bundle_pb2.SetAliasResponse()


def serve(folder: Path, probe: Probe, *, rules: Rules = RULES, **options: Any) -> Any:
    """Serves a probe that verifies tokens; yields a channel to it."""
    access = AccessConfig(jwks=str(write_jwks(folder / "jwks.json", [KEY])), **options)
    return serve_open(probe, EdgeConfig("127.0.0.1:0", drain_timeout_s=5, access=access), rules=rules)


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
#: Name → token, method, code and reason. What makes a token invalid, the verifier's own tests have.
REFUSALS: dict[str, tuple[Callable[[], str | None], str, str, str]] = {
    "without token": (lambda: None, "GetBundle", UNAUTHENTICATED, "TOKEN_MISSING"),
    "without token, a stream": (lambda: None, "ReadBlob", UNAUTHENTICATED, "TOKEN_MISSING"),
    "expired": (lambda: sign(lifetime_s=-60), "GetBundle", UNAUTHENTICATED, "TOKEN_EXPIRED"),
    "expired, a stream": (lambda: sign(lifetime_s=-60), "ReadBlob", UNAUTHENTICATED, "TOKEN_EXPIRED"),
    "signed by another": (lambda: SigningKey().sign(make_claims()), "GetBundle", UNAUTHENTICATED, "TOKEN_INVALID"),
    "wrong scope": (lambda: sign("infer promote"), "ReadBlob", DENIED, "SCOPE_MISSING"),
    "no scope": (lambda: sign(""), "GetBundle", DENIED, "SCOPE_MISSING"),
    "wrong alias": (lambda: sign(kiln_aliases=["*@staging"]), "SetAlias", DENIED, "ALIAS_FORBIDDEN"),
    "no alias": (lambda: sign(kiln_aliases=[]), "SetAlias", DENIED, "ALIAS_FORBIDDEN"),
    "no bundle": (lambda: sign(kiln_bundles=["a*"]), "ReadBlob", DENIED, "BUNDLE_FORBIDDEN"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
async def test_refused(tmp_path: Path, logs: Logs, case: str) -> None:
    make_token, method, code, reason = REFUSALS[case]
    token, probe = make_token(), Promoter()
    async with serve(tmp_path, probe, is_required=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, token)
    assert (caught.value.code().name, reason_of(caught.value)) == (code, reason)
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
            ("ReadBlob", sign("infer"), {"principal": "alice", "scope": "load or read"}),
            ("SetAlias", sign(kiln_aliases=[]), {"principal": "alice", "alias": "tiny@prod"}),
            ("ReadBlob", sign(kiln_bundles=["a*"]), {"principal": "alice", "bundle": ""}),
            ("GetBundle", None, {"accepted": "`authorization: Bearer JWT`"}),
        ):
            assert (await refusal(call(channel, method, token))).metadata == metadata
    assert [line.get("alias") for line in audit(logs)] == [None, "tiny@prod", None, None]
    assert [line.get("scope") for line in audit(logs)] == ["load or read", None, None, None]


async def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    probe = Probe()
    async with serve(tmp_path, probe, is_required=True) as channel:
        (row,) = (row for row in probe.server.list_metrics() if row.name == "kiln:access_refusals")
        for token in (None, sign(lifetime_s=-60), sign(lifetime_s=-60), sign("infer")):
            await refusal(call(channel, "ReadBlob", token))
        await call(channel, "ReadBlob", sign())
    assert dict(row.read()) == {("TOKEN_MISSING",): 1, ("TOKEN_EXPIRED",): 2, ("SCOPE_MISSING",): 1}


async def test_allowed_changes_have_one_audit_line_and_reads_none(tmp_path: Path, logs: Logs) -> None:
    token = sign(kiln_aliases=["tiny@*"])
    async with serve(tmp_path, Promoter(), is_required=True) as channel:
        for method in ("GetBundle", "ReadBlob", "SetAlias"):
            await call(channel, method, token)
    (line,) = audit(logs)
    assert (line["event"], line["log_level"]) == ("allowed", "info")
    assert (line["principal"], line["alias"]) == ("alice", "tiny@prod")
    assert [log["principal"] for log in logs if log["event"] == "call"] == ["alice"] * 3


async def test_on_loopback_no_token_is_needed_but_one_that_is_shown_is_verified(tmp_path: Path, logs: Logs) -> None:
    async with serve(tmp_path, Promoter()) as channel:
        await call(channel, "SetAlias", None)
        await refused(call(channel, "GetBundle", sign(lifetime_s=-60)), UNAUTHENTICATED, "TOKEN_EXPIRED")
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
        await refused(stub(channel).GetBundle(GET, metadata=metadata), UNAUTHENTICATED, "TOKEN_INVALID")


async def test_a_server_without_keys_looks_at_no_token(logs: Logs) -> None:
    async with serve_open(Probe()) as channel:
        await stub(channel).GetBundle(GET, metadata=bearer("hello"))
    assert audit(logs) == []


async def test_a_server_does_not_start_without_valid_keys(tmp_path: Path) -> None:
    config = EdgeConfig("127.0.0.1:0", access=AccessConfig(jwks=str(tmp_path / "absent")))
    with pytest.raises(KeySetInvalid, match="absent: No such file"):
        async with serve_open(Probe(), config):
            pass


async def test_health_and_reflection_need_no_token(tmp_path: Path, logs: Logs) -> None:
    async with serve(tmp_path, Probe(), is_required=True) as channel:
        for name in ("", "liveness", SERVICE):
            assert await check_health(channel, name) == SERVING
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests)
        assert (await anext(aiter(listed))).list_services_response.service
    assert audit(logs) == []


async def test_reflection_can_be_switched_off() -> None:
    async with serve_open(Probe(), EdgeConfig("127.0.0.1:0", reflection=False)) as channel:
        # Sends no request: the client could not tell one that fails to be sent from the refusal.
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        assert await reflected.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await check_health(channel) == SERVING


async def test_a_method_without_a_rule_needs_the_scope_admin(tmp_path: Path) -> None:
    async with serve(tmp_path, Probe(), rules={}, is_required=True) as channel:
        how = await refused(call(channel, "GetBundle", sign("infer load compile promote")), DENIED, "SCOPE_MISSING")
        assert how.metadata["scope"] == "admin"
        await call(channel, "GetBundle", sign("admin"))


async def test_a_request_is_decoded_after_its_caller_is_known(tmp_path: Path) -> None:
    async with serve(tmp_path, Probe(), is_required=True) as channel:
        malformed = channel.unary_unary(f"/{SERVICE}/GetBundle")
        for metadata, reason in (((), "TOKEN_MISSING"), (bearer(sign()), "REQUEST_MALFORMED")):
            assert (await refusal(malformed(b"\xff\xff", metadata=metadata))).reason == reason


async def test_streams_of_one_principal_are_bounded(tmp_path: Path, logs: Logs) -> None:
    async with serve(tmp_path, Probe(hang), max_streams=2) as channel:
        held = []
        for subject in ("alice", "alice", "bob", None, None, None):
            stream = stub(channel).ReadBlob(READ, metadata=bearer(sign(sub=subject)) if subject else ())
            await anext(aiter(stream))
            held.append(stream)
        how = await refused(call(channel, "ReadBlob", sign()), "RESOURCE_EXHAUSTED", "PRINCIPAL_BUSY")
        assert (how.metadata["principal"], how.retry_after_s) == ("alice", 1)
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
    probe = Probe()
    async with serve_open(probe, config, rules=RULES):
        for host, code in (("127.0.0.1", grpc.StatusCode.OK), (elsewhere, grpc.StatusCode.UNAVAILABLE)):
            async with own_channel(f"{host}:{probe.server.local_port}") as channel:
                assert await stub(channel).GetBundle(GET, timeout=HANG_S).code() is code


def find_other_address() -> str:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        return str(probe.getsockname()[0])
