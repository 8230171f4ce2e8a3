"""A file that is written while ranks map it: they end, and the deployment says what is wrong."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bundle.store.reader import open_bundle
from runtime_svc.deployments.launcher import FileWatch
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, hold, token_request, tokens_of

WEIGHTS = "weights/tp0_sharded_checkpoint.safetensors"


@pytest.fixture(autouse=True)
def _watching_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.server.FileWatch", partial(FileWatch, interval_s=0.05))
    monkeypatch.setattr("runtime_svc.engine.ranks.RESTART_DELAYS_S", (0.0, 0.01))


def find_weights(served: Runtime, digest: str) -> Path:
    bundle = open_bundle(served.store, digest)
    blob = bundle.manifest.weight_sets[0].shards[0].blob
    assert blob is not None
    return bundle.blob_path(blob)


def overwrite(path: Path) -> None:
    """Changes the bytes of a file in place, as its owner and root can."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


async def test_streams_end_and_the_damage_is_named(served: Runtime, logs: list[dict[str, Any]]) -> None:
    digest = served.publish()
    await served.load("story", "d")
    stream = await hold(served, token_request([5]))
    overwrite(find_weights(served, digest))
    await refused(stream, "UNAVAILABLE", "MAPPED_FILE_CHANGED")
    assert "is corrupt" in (await served.wait_for_state("FAILED", "d")).message
    assert [log["title"] for log in logs if log["event"] == "a mapped file has changed"] == [WEIGHTS]


async def test_a_file_that_is_removed_or_replaced_serves_on(served: Runtime, tmp_path: Path) -> None:
    path = find_weights(served, served.publish())
    await served.load("story", "d")
    group = served.ranks
    # As it lives on while ranks map it: a file system may give the next one its number otherwise.
    path.rename(tmp_path / "old")
    path.write_bytes(b"another file")
    assert tokens_of(await served.generate([5], deployment_id="d")) == expected_tokens([5], 5)
    assert served.ranks is group
