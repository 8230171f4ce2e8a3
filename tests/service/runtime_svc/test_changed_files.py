"""A file that is written while ranks map it: they end, and the deployment says what is wrong."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bundle.reader import open_bundle
from runtime_svc.deployments.file_watch import FileWatch
from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, hold, raises, serve_runtime, token_request, tokens_of

WEIGHTS = "weights/tp0_sharded_checkpoint.safetensors"


@pytest.fixture(autouse=True)
def _watching_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.server.FileWatch", partial(FileWatch, interval_s=0.05))
    monkeypatch.setattr("runtime_svc.engine.relaunch.RESTART_DELAYS_S", (0.0, 0.01))


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


async def test_streams_end_and_the_damage_is_named(tmp_path: Path) -> None:
    # To render the traceback of a failed engine takes seconds.
    with capture_logs() as logs:
        await damage_what_is_served(tmp_path)
    assert [log["title"] for log in logs if log["event"] == "a mapped file has changed"] == [WEIGHTS]


async def damage_what_is_served(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        digest = served.publish()
        await served.load("story", "d")
        stream = await hold(served, token_request([5]))
        overwrite(find_weights(served, digest))
        async with raises("UNAVAILABLE", "MAPPED_FILE_CHANGED"):
            async with asyncio.timeout(HANG_S):
                async for _ in stream:
                    pass
        deployment = await served.wait_for_state("FAILED", "d")
        assert "is corrupt" in deployment.message


async def test_a_file_that_is_removed_or_replaced_serves_on(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        path = find_weights(served, served.publish())
        await served.load("story", "d")
        group = served.ranks
        path.unlink()
        path.write_bytes(b"another file")
        assert tokens_of(await served.generate([5], deployment_id="d")) == expected_tokens([5], 5)
        assert served.ranks is group
