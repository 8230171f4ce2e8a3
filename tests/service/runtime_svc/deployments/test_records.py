"""Records that outlive the process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bundle.errors import ResourcesShort
from runtime_svc.deployments.deployment_spec import DeploymentSpec, Origin
from runtime_svc.deployments.errors import StateInUse, StateInvalid
from runtime_svc.deployments.records import (
    FILE_NAME,
    AdapterRecord,
    DeploymentRecord,
    RecordStore,
    WeightsRecord,
)
from runtime_svc.errors import StateUnwritable
from tests.repository import ROOT
from tests.shortages import few_descriptors

RECORD = DeploymentRecord(
    spec=DeploymentSpec("chat", "story@prod", (1, 0), 2, True),
    origin=Origin.FILE,
    digest="sha256:" + "1" * 64,
    cores=(1, 0),
    weights=WeightsRecord(ref="pirate", digest="sha256:" + "2" * 64),
    weight_epoch=7,
    created_at_s=1.5,
)
EMPTY = msgspec.structs.replace(
    RECORD, spec=replace(RECORD.spec, deployment_id="b"), weights=None, weight_epoch=0, origin=Origin.RPC
)

# Saves ever higher epochs, and says so after each.
WRITER = """
import asyncio, msgspec, sys
from pathlib import Path
from runtime_svc.deployments.records import RecordStore
from tests.service.runtime_svc.deployments.test_records import RECORD

async def main():
    store = RecordStore(Path(sys.argv[1]))
    for epoch in range(1, 1_000_000):
        await store.deployments.save(msgspec.structs.replace(RECORD, weight_epoch=epoch))
        print(epoch, flush=True)

asyncio.run(main())
"""


async def test_records_are_kept_replaced_and_forgotten(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "new" / "state")
    runtime_id = store.runtime_id
    for record in (RECORD, EMPTY, msgspec.structs.replace(RECORD, weight_epoch=8)):
        await store.deployments.save(record)
    store.close()
    again = RecordStore(tmp_path / "new" / "state")
    assert again.runtime_id == runtime_id
    assert again.deployments.list() == (EMPTY, msgspec.structs.replace(RECORD, weight_epoch=8))
    await again.deployments.forget("chat")
    await again.deployments.forget("nobody")
    assert again.deployments.list() == (EMPTY,)
    again.close()


async def test_adapters_have_records_of_their_own_which_go_with_their_deployments(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    adapters = [
        AdapterRecord(deployment_id=deployment_id, owner=owner, name="swords", digest="1", bundle_digest="2")
        for deployment_id, owner in (("b", "alice"), ("chat", ""), ("chat", "alice\nbob"), ("chat2", "alice"))
    ]
    for record in (EMPTY, RECORD):
        await store.deployments.save(record)
    for adapter in adapters:
        await store.adapters.save(adapter)
    written: list[str] = []
    store._database.set_trace_callback(written.append)
    replaced = msgspec.structs.replace(adapters[2], digest="3")
    await store.adapters.save(replaced)
    await store.deployments.save(msgspec.structs.replace(RECORD, weight_epoch=8))
    store._database.set_trace_callback(None)
    changes = [statement for statement in written if statement.startswith(("INSERT", "DELETE", "--"))]
    has_adapter = [b"swords".hex() in change.lower() for change in changes]
    assert has_adapter == [True, False], "one row each, and none but its own"
    assert store.adapters.list() == (adapters[0], adapters[1], replaced, adapters[3])
    await store.adapters.forget(adapters[1].key)
    await store.deployments.forget("chat")
    assert store.adapters.list() == (adapters[0], adapters[3])
    store.close()


def test_one_process_holds_a_directory(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    with pytest.raises(StateInUse, match="another runtime"):
        RecordStore(tmp_path)
    store.close()
    RecordStore(tmp_path).close()


@pytest.mark.parametrize("delay_lines", [1, 5, 30])
def test_killed_writer_loses_nothing_that_it_was_told_is_kept(tmp_path: Path, delay_lines: int) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        for _ in range(delay_lines):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        acknowledged = delay_lines + len(writer.stdout.readlines())
    store = RecordStore(tmp_path)
    (record,) = store.deployments.list()
    assert acknowledged <= record.weight_epoch <= acknowledged + 1
    store.close()


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StateInvalid, match=FILE_NAME):
        RecordStore(tmp_path)


async def test_record_of_another_shape_is_named(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    with store._database:
        store._database.execute("INSERT INTO deployments VALUES ('x', '{}')")
    with pytest.raises(StateInvalid, match="missing required field"):
        store.deployments.list()
    store.close()


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateInvalid, match="file"):
        RecordStore(tmp_path / "file" / "state")


async def test_disk_that_takes_nothing(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store._database.execute("PRAGMA query_only = ON")
    with pytest.raises(StateUnwritable):
        await store.deployments.save(RECORD)
    with pytest.raises(StateUnwritable):
        await store.deployments.forget("chat")
    store.close()


async def test_a_lack_of_descriptors_and_a_full_disk_are_named_and_pass(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    await store.deployments.save(RECORD)
    with few_descriptors(), pytest.raises(ResourcesShort, match="descriptors of this process"):
        await store.deployments.save(EMPTY)
    await store.deployments.save(EMPTY)
    (num_pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count={num_pages}")
    long = msgspec.structs.replace(EMPTY, spec=replace(EMPTY.spec, ref="x" * 10_000))
    with pytest.raises(ResourcesShort, match="disk space"):
        await store.deployments.save(long)
    store._database.execute("PRAGMA max_page_count=1000")
    await store.deployments.save(long)
    assert store.deployments.list() == (long, RECORD)
    store.close()
