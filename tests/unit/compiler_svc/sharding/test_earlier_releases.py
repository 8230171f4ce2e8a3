"""Shards of Llama checkpoints have the bytes that v0.1 wrote, so that bundles of both share their blobs."""

from __future__ import annotations

import hashlib
import io
import json

import pytest

from compiler_svc.models.registry import describe_model
from compiler_svc.sharding.plan import plan_weights
from compiler_svc.sharding.writer import write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from tests.parity.geometries import LLAMA_GEOMETRIES as GEOMETRIES
from tests.parity.reference import write_checkpoint
from tests.repository import ROOT

#: SHA-256 of each rank's shard, by "model-tpN-dtype", as commit d567ef4 wrote them.
DIGESTS: dict[str, list[str]] = json.loads(
    (ROOT / "tests/service/earlier_releases/v0.1/weight_digests.json").read_text()
)


@pytest.fixture(scope="module", params=[*GEOMETRIES, "kiln-tiny"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    if request.param == "kiln-tiny":
        return Checkpoint.open(ROOT / "examples/models/kiln-tiny")
    path = tmp_path_factory.mktemp("models") / request.param
    write_checkpoint(path, request.param)
    return Checkpoint.open(path)


def test_weight_bytes_are_those_of_v0_1(checkpoint: Checkpoint) -> None:
    keys = [key for key in DIGESTS if key.rpartition("-tp")[0] == checkpoint.path.name]
    assert len(keys) >= 2
    description = describe_model(checkpoint.config)
    for key in keys:
        degree, dtype = key.rpartition("-tp")[2].split("-")
        plan = plan_weights(
            description,
            checkpoint,
            dtype=dtype,
            cast_type="config",
            tp_degree=int(degree),  # type: ignore[arg-type]
        )
        digests = []
        for rank in range(plan.tp_degree):
            sink = io.BytesIO()
            write_shards(plan, checkpoint, {rank: sink})
            digests.append(hashlib.sha256(sink.getvalue()).hexdigest())
        assert digests == DIGESTS[key], key
