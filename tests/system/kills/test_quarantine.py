"""SIGKILL for a runtime whenever it loads: what was under way alone is not loaded again by itself, the rest is."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bundle.reference import Reference
from bundle.store.layout import Layout
from bundle.store.tags import WrittenTag, write_tags
from tests.hang_guard import HANG_S
from tests.ranks.toy_bundles import MakeToy, toy, toy_directory
from tests.ranks.toy_publishing import publish_toy
from tests.servers.answers import reason_of
from tests.servers.halt import SITE, VARIABLE, Halt
from tests.servers.stack import token_request, tokens_of
from tests.system.runtime_process import RuntimeProcess, State, run_runtime, wait_until

__all__ = ["toy", "toy_directory"]


@pytest.fixture
def process(tmp_path: Path, toy: MakeToy) -> Iterator[RuntimeProcess]:
    """A runtime that has not been started, whose file declares the toy as `a` and as `b`."""
    digest = publish_toy(Layout.create(tmp_path / "bundles"), toy("tokens", 0), 0)
    declared = tmp_path / "deployments.yml"
    declared.write_text(yaml.safe_dump([{"id": name, "ref": digest} for name in "ab"]))
    one = RuntimeProcess(None, tmp_path, f"--bundles={tmp_path / 'bundles'}", f"--deployments={declared}")
    yield one
    one.stop()


def loads_under_way(directory: Path) -> set[str]:
    """The deployments whose loads are under way, by the runtime's database."""
    with closing(sqlite3.connect(f"file:{directory / 'cache' / 'runtime.db'}?mode=ro", uri=True)) as database:
        records: list[dict[str, Any]] = [
            msgspec.json.decode(record) for (record,) in database.execute("SELECT record FROM loads")
        ]
    return {record["spec"]["deployment_id"] for record in records if record["is_under_way"]}


def hold_loads(process: RuntimeProcess) -> None:
    """Stops the forkserver of ranks as soon as it is there, so that no load ends that is under way."""
    wait_until(lambda: process.find("kiln-forkserver") != [])
    for one in process.find("kiln-forkserver"):
        one.suspend()


def health_of(process: RuntimeProcess, name: str) -> str:
    with grpc.insecure_channel(process.address) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


@pytest.mark.slow
def test_a_load_that_takes_the_runtime_down_is_quarantined_and_another_is_not(
    process: RuntimeProcess, tmp_path: Path
) -> None:
    for under_way in ({"a", "b"}, {"a"}):
        process.start()
        hold_loads(process)
        wait_until(lambda expected=under_way: loads_under_way(tmp_path) == expected)
        process.kill()
    process.start()
    process.wait_for("READY", deployment_id="b")
    failed = process.get("a")
    assert failed.state == State.STATE_FAILED
    assert "quarantined: the runtime died 2 times" in failed.message
    assert len(process.ranks()) == 1
    assert [health_of(process, name) for name in ("", "deployment/a", "deployment/b")] == [
        "NOT_SERVING",
        "NOT_SERVING",
        "SERVING",
    ]
    request = token_request("a", [3, 9, 4], 4, temperature=0.0)
    with pytest.raises(grpc.RpcError) as caught:
        list(process.generation.Generate(request))
    assert reason_of(caught.value) == "DEPLOYMENT_NOT_READY"
    process.load(failed.roles[0].bundle_ref, "a")
    assert health_of(process, "") == "SERVING"
    assert len(tokens_of(list(process.generation.Generate(request)))) == 4
    wait_until(lambda: loads_under_way(tmp_path) == set())


@pytest.mark.slow
def test_weights_of_an_alias_that_take_the_runtime_down_are_quarantined_and_the_old_ones_serve(
    tmp_path: Path, toy: MakeToy
) -> None:
    layout = Layout.create(tmp_path / "bundles")
    digests = [publish_toy(layout, toy("tokens", 0), seed) for seed in (0, 1)]

    def name(digest: str) -> None:
        write_tags(layout, lambda: [WrittenTag(Reference("toy", alias="live"), digest, 1, None)])

    name(digests[0])
    options = (f"--bundles={tmp_path / 'bundles'}", "--follow-interval=0.1")
    with run_runtime(None, tmp_path, *options) as process:
        process.load("toy@live", "a", follow_alias=True)
        request = token_request("a", [3, 9, 4], 8, temperature=0.0)
        old = tokens_of(list(process.generation.Generate(request)))
        for _ in range(2):
            process.wait_for("READY", deployment_id="a")
            # The load of the weights waits for the rank, and so is under way when the runtime dies.
            process.ranks()[0].suspend()
            name(digests[1])
            wait_until(lambda: loads_under_way(tmp_path) == {"a"})
            process.kill()
            name(digests[0])
            process.start()
        process.wait_for("READY", deployment_id="a")
        name(digests[1])
        wait_until(lambda: "quarantined: the runtime died 2 times" in process.get("a").follow_message)
        assert tokens_of(list(process.generation.Generate(request))) == old
        assert loads_under_way(tmp_path) == set()
        process.load("toy@live", "a", follow_alias=True)
        wait_until(lambda: process.get("a").roles[0].weight_epoch == 2)
        assert process.get("a").follow_message == ""
        assert tokens_of(list(process.generation.Generate(request))) != old


@pytest.mark.slow
def test_a_declared_load_whose_rank_is_killed_is_tried_again(
    process: RuntimeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt = Halt(tmp_path / "halt")
    monkeypatch.setenv(VARIABLE, str(halt.folder))
    monkeypatch.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)
    declared = tmp_path / "deployments.yml"
    declared.write_text(yaml.safe_dump(yaml.safe_load(declared.read_text())[:1]))
    halt.order("^kiln-rank-0 ")
    process.start()
    for number in range(3):
        wait_until(lambda: halt.find() is not None, 2 * HANG_S)
        victim = halt.find()
        assert victim is not None
        assert process.get("a").state == State.STATE_LOADING, "it cannot end its load"
        # Before the next one is forked.
        if number < 2:
            halt.order("^kiln-rank-0 ")
        victim.kill()
        wait_until(lambda: process.get("a").message == "rank 0 died: SIGKILL")
    assert process.wait_for("READY", deployment_id="a").message == ""
    request = token_request("a", [3, 9, 4], 4, temperature=0.0)
    assert len(tokens_of(list(process.generation.Generate(request)))) == 4
    assert health_of(process, "") == "SERVING"
    wait_until(lambda: loads_under_way(tmp_path) == set())
