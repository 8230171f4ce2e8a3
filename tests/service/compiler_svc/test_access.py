"""What a principal may do to a whole compiler."""

from __future__ import annotations

from pathlib import Path

from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from structlog.testing import capture_logs

from tests.servers.refusals import expect, refusal, refused
from tests.servers.running_compiler import serve_compiler
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks

KEY = SigningKey()
DENIED = "PERMISSION_DENIED"


def allow(scope: str, subject: str = "alice", *aliases: str) -> tuple[tuple[str, str], ...]:
    return bearer(KEY.sign(make_claims(scope, sub=subject, kiln_aliases=list(aliases))))


async def test_builds_of_one_principal_are_bounded(home: Path) -> None:
    jwks = write_jwks(home / "jwks.json", [KEY])
    alice = allow("compile")
    async with serve_compiler(home, f"--auth-jwks={jwks}", "--max-builds-per-principal=2") as (client, runner):
        first = await client.compile(salt="1", request_id="first", metadata=alice)
        await client.compile(salt="2", metadata=alice)
        with capture_logs() as logs:
            how = await refusal(client.compile(salt="3", metadata=alice))
        expect(how, "RESOURCE_EXHAUSTED", "PRINCIPAL_BUSY", principal="alice", what="builds", limit="2")
        assert how.retry_after_s == 15
        assert [log["reason"] for log in logs if log["event"] == "refused"] == ["PRINCIPAL_BUSY"]
        # A repeated call starts nothing.
        assert (await client.compile(salt="1", request_id="first", metadata=alice)).name == first.name
        bob = await client.compile(salt="3", metadata=allow("compile", "bob"))
        for _ in range(2):
            await client.compile(salt="4")
        runner.is_open.set()
        await client.finish(bob)
        await client.build(salt="5", metadata=alice)


async def test_an_alias_is_moved_by_those_who_may(home: Path) -> None:
    jwks = write_jwks(home / "jwks.json", [KEY])
    async with serve_compiler(home, f"--auth-jwks={jwks}") as (client, runner):
        runner.is_open.set()
        await client.build()
        request = bundle_pb2.SetAliasRequest(ref="tiny:v1", alias="prod")
        for metadata, reason in (
            (allow("compile admin"), "SCOPE_MISSING"),
            (allow("promote", "alice", "*@staging", "other@prod"), "ALIAS_FORBIDDEN"),
        ):
            await refused(client.bundles.SetAlias(request, metadata=metadata), DENIED, reason)
        moved = await client.bundles.SetAlias(request, metadata=allow("promote", "alice", "tiny@*"))
        assert moved.alias.version == 1
        deletion = bundle_pb2.DeleteAliasRequest(name="tiny", alias="prod")
        call = client.bundles.DeleteAlias(deletion, metadata=allow("promote", "alice", "a@prod"))
        await refused(call, DENIED, "ALIAS_FORBIDDEN")
        # The name is read as the method reads it; what that refuses is refused alike.
        for ref in ("sha256:" + "0" * 64, "tiny:v1@staging"):
            request = bundle_pb2.SetAliasRequest(ref=ref, alias="prod")
            call = client.bundles.SetAlias(request, metadata=allow("promote", "alice", "*"))
            await refused(call, "INVALID_ARGUMENT", "REF_INVALID")
        # A planner may not remove anything.
        planner = allow("compile")
        await client.compiler.PlanCompile(pb.PlanCompileRequest(model="tiny", config_json="{}"), metadata=planner)
        for call in (
            client.bundles.DeleteBundle(bundle_pb2.DeleteBundleRequest(ref="tiny:v1"), metadata=planner),
            client.bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest(), metadata=planner),
            client.bundles.ImportBundle(bundle_pb2.ImportBundleRequest(), metadata=planner),
        ):
            assert (await refused(call, DENIED, "SCOPE_MISSING")).metadata["scope"] == "admin"
