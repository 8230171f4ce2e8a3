"""Plans know the bytes of quantized weights, part by part."""

from __future__ import annotations

import io
from typing import Final

import pytest

from bundle.abi.formats import FORMATS
from compiler_svc.models.transforms import INT4, ModelChanges, Quantization
from compiler_svc.planning.weights import measure_weights
from compiler_svc.sharding.writer import write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.specs import make_plan
from tests.repository import ROOT

MODEL: Final = ROOT / "examples/models/kiln-tiny"
NAMES: Final = (*(name for name, row in FORMATS.items() if not row.group), INT4, "int4_by_64", "int4_by_32")


@pytest.mark.parametrize(("name", "tp_degree"), [(name, 1 + number % 2) for number, name in enumerate(NAMES)])
def test_a_shard_has_the_bytes_of_the_plan(name: str, tp_degree: int) -> None:
    checkpoint = Checkpoint.open(MODEL)
    description = ModelChanges(fuses_qkv=tp_degree > 1, quantization=Quantization(format=name)).apply(
        checkpoint.description
    )
    plan = make_plan(checkpoint, description=description, tp_degree=tp_degree, dtype="bfloat16")
    planned_bytes = sum(measure_weights(plan).values())
    written_bytes = write_shards(plan, checkpoint, {rank: io.BytesIO() for rank in range(tp_degree)})
    assert abs(planned_bytes / written_bytes - 1) < 0.02
