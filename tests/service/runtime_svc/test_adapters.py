"""Adapters as clients see them: what a name means, and to whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.digest import sha256_bytes
from runtime_svc.deployments import adapter_names
from tests.ranks.fakes import BIAS, expected_tokens
from tests.servers.adapters import (
    BASE,
    HOUSE,
    PROMPT,
    ask_with,
    list_adapters,
    list_names,
    load_adapter,
    publish_adapter,
    unload_adapter,
    with_adapter,
)
from tests.servers.logs import Logs
from tests.servers.refusals import refusal, refused
from tests.servers.runtime import Runtime, details_of, hold, serve_runtime, tokens_of
from tests.servers.tokens import SigningKey, bearer, make_claims, write_jwks

KEY = SigningKey()


async def test_a_bundles_adapters_serve_all_at_once(served: Runtime) -> None:
    deployment = await served.deploy(adapters={"house": 100, "guest": 200}, **BASE)
    assert (deployment.capabilities.adapters, deployment.capabilities.adapter_slots) == (["guest", "house"], 2)
    assert deployment.load.adapters == 2
    assert [await ask_with(served, name) for name in ("house", "guest", "house")] == [100, 200, 100]
    listed = await list_adapters(served)
    assert listed.num_slots == 2
    guest, house = listed.adapters
    assert (guest.name, guest.digest, guest.bundle_ref, guest.owner) == ("guest", sha256_bytes(b"200"), "", "")
    assert guest.bundle_digest == deployment.roles[0].bundle_digest
    assert {guest.slot, house.slot} == {0, 1}
    assert tokens_of(await served.generate(PROMPT)) == expected_tokens(PROMPT, 5), "the model alone"


async def test_an_adapter_is_loaded_named_replaced_and_unloaded(based: Runtime) -> None:
    digest = publish_adapter(based, "swords", 7)
    publish_adapter(based, "hooks", 8)
    loaded = await load_adapter(based, "swords")
    assert (loaded.name, loaded.digest, loaded.bundle_ref) == ("pirate", sha256_bytes(b"7"), "swords")
    assert (loaded.bundle_digest, loaded.HasField("slot"), loaded.active_requests) == (digest, False, 0)
    assert await ask_with(based, "pirate") == 7
    await load_adapter(based, "hooks", name="team/hooks:v2")
    assert await ask_with(based, "team/hooks:v2") == 8
    events = await based.ask(with_adapter("pirate", num_sequences=2))
    (first, second) = (tokens_of([one for one in events if one.sequence_index == index]) for index in (0, 1))
    assert first == second == expected_tokens(PROMPT, 5, bias=BIAS + 7)
    assert await list_names(based) == ["house", "pirate", "team/hooks:v2"]
    assert (await load_adapter(based, digest)).bundle_ref == "swords", "it means that already"
    caught = await refused(load_adapter(based, "hooks"), "ALREADY_EXISTS", "ADAPTER_EXISTS")
    assert caught.metadata == {"name": "pirate", "digest": sha256_bytes(b"7"), "offered": sha256_bytes(b"8")}
    assert await ask_with(based, "pirate") == 7
    await load_adapter(based, "hooks", replace=True)
    assert await ask_with(based, "pirate") == 8
    assert await unload_adapter(based, "pirate") == 0
    assert await list_names(based) == ["house", "team/hooks:v2"]
    caught = await refused(based.ask(with_adapter("pirate")), "NOT_FOUND", "ADAPTER_NOT_FOUND")
    assert caught.fields == {"adapter": "got 'pirate'; accepted: house, team/hooks:v2"}
    caught = await refused(unload_adapter(based, "pirate"), "NOT_FOUND", "ADAPTER_NOT_FOUND")
    assert caught.fields == {"name": "got 'pirate'; accepted: team/hooks:v2"}


async def test_requests_that_have_come_end_with_their_adapter(based: Runtime) -> None:
    publish_adapter(based, "swords", 7)
    publish_adapter(based, "hooks", 8)
    await load_adapter(based, "swords")
    call = await hold(based, with_adapter("pirate"))
    (_, pirate) = (await list_adapters(based)).adapters
    assert pirate.active_requests == 1
    await load_adapter(based, "hooks", replace=True)
    assert await unload_adapter(based, "pirate") == 0, "none with what replaced it"
    await load_adapter(based, "swords")
    assert await unload_adapter(based, "pirate") == 1
    based.ranks.gate.set()
    assert tokens_of([event async for event in call]) == expected_tokens(PROMPT, 5, bias=BIAS + 7)


async def test_names_come_from_the_caller_first_and_from_the_bundle_then(based: Runtime) -> None:
    publish_adapter(based, "swords", 7)
    await refused(unload_adapter(based, "house"), "NOT_FOUND", "ADAPTER_NOT_FOUND")
    await load_adapter(based, "swords", name="house")
    assert await ask_with(based, "house") == 7
    await unload_adapter(based, "house")
    assert await ask_with(based, "house") == 100


async def test_a_session_does_not_continue_what_another_adapter_computed(based: Runtime) -> None:
    publish_adapter(based, "swords", 7)
    await load_adapter(based, "swords")

    async def turn(name: str) -> int:
        events = await based.ask(with_adapter(name, session_id="s"))
        return int(events[-1].finished.usage.cached_prompt_tokens)

    assert [await turn(name) for name in ("pirate", "pirate", "house", "", "pirate")] == [0, 4, 0, 0, 0]
    await unload_adapter(based, "pirate")
    await load_adapter(based, "swords", name="same-bytes")
    assert await turn("same-bytes") == 4, "keys depend on the adapter's numbers, not on its name"


async def test_what_does_not_fit_is_refused_and_changes_nothing(based: Runtime) -> None:
    publish_adapter(based, "swords", 7)
    await load_adapter(based, "swords")
    based.publish("weights", has_executables=False, **BASE)
    based.publish("two", has_executables=False, has_weights=False, adapters={"a": 1, "b": 2}, **BASE)
    publish_adapter(based, "other", 1, graph_abi_digest="sha256:" + "1" * 64)
    for ref, reason in (
        ("story", "ADAPTER_MISSING"),
        ("weights", "ADAPTER_MISSING"),
        ("two", "ADAPTER_MISSING"),
        ("other", "GRAPH_ABI_MISMATCH"),
    ):
        await refused(load_adapter(based, ref, replace=True), "FAILED_PRECONDITION", reason)
    await refused(load_adapter(based, "absent"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
    await refused(load_adapter(based, "a b"), "INVALID_ARGUMENT", "REQUEST_INVALID")
    for name in ("a b", "x" * 129, "ä"):
        caught = await refused(load_adapter(based, "swords", name=name), "INVALID_ARGUMENT", "REQUEST_INVALID")
        assert [*caught.fields] == ["name"]
    caught = await refused(based.load("swords", "e"), "FAILED_PRECONDITION", "EXECUTABLES_MISSING")
    assert "LoadAdapter" in caught.message
    caught = await refused(based.load_weights("swords"), "FAILED_PRECONDITION", "WEIGHTS_MISSING")
    assert "LoadAdapter" in caught.message
    for call in (
        based.control.LoadAdapter(pb.LoadAdapterRequest(deployment_id="x", ref="swords")),
        based.control.UnloadAdapter(pb.UnloadAdapterRequest(deployment_id="x", name="pirate")),
        based.control.ListAdapters(pb.ListAdaptersRequest(deployment_id="x")),
    ):
        await refused(call, "NOT_FOUND", "DEPLOYMENT_NOT_FOUND")
    assert await list_names(based) == ["house", "pirate"]
    assert [await ask_with(based, "pirate"), await ask_with(based, "house")] == [7, 100]


async def test_deployments_without_room_say_so(served: Runtime) -> None:
    publish_adapter(served, "swords", 7)
    await served.deploy()
    await refused(load_adapter(served, "swords"), "FAILED_PRECONDITION", "ADAPTERS_UNSUPPORTED")
    caught = await refused(served.ask(with_adapter("pirate")), "INVALID_ARGUMENT", "FEATURE_NOT_SERVED")
    assert "lora_config" in caught.message
    listed = await list_adapters(served)
    assert (len(listed.adapters), listed.num_slots) == (0, 0)


async def test_principals_have_names_of_their_own(tmp_path: Path, logs: Logs) -> None:
    jwks = write_jwks(tmp_path / "jwks.json", [KEY])
    async with serve_runtime(tmp_path, f"--auth-jwks={jwks}") as served:
        await served.deploy(adapters=HOUSE, **BASE)
        publish_adapter(served, "swords", 7)
        publish_adapter(served, "hooks", 8)
        alice, bob, guest, admin, loader = (
            bearer(KEY.sign(make_claims(scope, sub=name)))
            for name, scope in (
                ("alice", "infer load"),
                ("bob", "infer load"),
                ("guest", "infer"),
                ("admin", "infer admin"),
                ("loader", "load"),
            )
        )
        logs.clear()
        await load_adapter(served, "swords", alice)
        (line,) = [log for log in logs if log["event"] == "allowed"]
        assert (line["principal"], line["deployment"], line["method"].rpartition("/")[2]) == (
            "alice",
            "d",
            "LoadAdapter",
        )
        await load_adapter(served, "hooks", bob)
        assert [await ask_with(served, "pirate", who) for who in (alice, bob)] == [7, 8]
        assert [await ask_with(served, "house", who) for who in (alice, guest)] == [100, 100]
        theirs = await refused(served.ask(with_adapter("pirate"), guest), "NOT_FOUND", "ADAPTER_NOT_FOUND")
        absent = await refused(served.ask(with_adapter("absent"), guest), "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert theirs.message.replace("pirate", "absent") == absent.message, "they cannot be told apart"
        assert theirs.metadata | {"name": "absent"} == absent.metadata
        await refused(unload_adapter(served, "pirate", loader), "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert await list_names(served, guest) == ["house"]
        assert [(one.name, one.owner) for one in (await list_adapters(served, admin)).adapters] == [
            ("house", ""),
            ("pirate", "alice"),
            ("pirate", "bob"),
        ]
        assert await list_names(served, loader) == ["house"]
        for call in (load_adapter(served, "swords", guest), unload_adapter(served, "pirate", guest)):
            assert (await refusal(call)).reason == "SCOPE_MISSING"
        await unload_adapter(served, "pirate", alice)
        await refused(served.ask(with_adapter("pirate"), alice), "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert await ask_with(served, "pirate", bob) == 8


async def test_callers_and_deployments_have_bounds(based: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_adapter(based, "swords", 7)
    monkeypatch.setattr(adapter_names, "MAX_CALLER_ADAPTERS", 1)
    await load_adapter(based, "swords")
    await load_adapter(based, "swords")
    caught = await refused(load_adapter(based, "swords", name="more"), "RESOURCE_EXHAUSTED", "TOO_MANY_ADAPTERS")
    assert caught.metadata == {"bounded": "principal", "limit": "1"}
    monkeypatch.setattr(adapter_names, "MAX_CALLER_ADAPTERS", 9)
    monkeypatch.setattr(adapter_names, "MAX_ADAPTERS", 1)
    caught = await refused(load_adapter(based, "swords", name="more"), "RESOURCE_EXHAUSTED", "TOO_MANY_ADAPTERS")
    assert caught.metadata["bounded"] == "deployment"
    await unload_adapter(based, "pirate")
    await load_adapter(based, "swords", name="more")


async def test_of_two_loads_of_a_name_at_once_one_is_refused(based: Runtime) -> None:
    publish_adapter(based, "swords", 7)
    publish_adapter(based, "hooks", 8)
    loads = await asyncio.gather(*(refusal_of(load_adapter(based, ref)) for ref in ("swords", "hooks", "swords")))
    meant = await ask_with(based, "pirate")
    expected = [None, "ADAPTER_EXISTS", None] if meant == 7 else ["ADAPTER_EXISTS", None, "ADAPTER_EXISTS"]
    assert loads == expected


async def test_a_deployment_that_ends_takes_its_loads_along(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy(adapters=HOUSE, **BASE)
        publish_adapter(first, "swords", 7)
        loads = asyncio.gather(*(refusal_of(load_adapter(first, "swords", name=f"a{index}")) for index in range(20)))
        await asyncio.sleep(0.05)
        await first.unload()
        assert {*await loads} <= {None, "DEPLOYMENT_NOT_READY", "DEPLOYMENT_NOT_FOUND"}
    async with serve_runtime(tmp_path) as second:
        assert second.server.deployments.list() == []


async def refusal_of(call: Any) -> str | None:
    """Why a call is refused; None if it is not."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return details_of(error)[0].reason
    return None
