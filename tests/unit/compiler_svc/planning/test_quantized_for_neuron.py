"""What plans for Neuron make of quantized weights, and of checkpoints that are quantized already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bundle.manifest import TargetKind
from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.errors import ConfigInvalid
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.planning.checkpoint_quantization import read_quantization
from compiler_svc.planning.planner import Planner
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.quantized import WRITERS
from tests.checkpoints.random_weights import write_checkpoint
from tests.unit.compiler_svc.planning.planning import plan


def read(path: Path, writer: str) -> Checkpoint:
    write_checkpoint(path / "packed")
    WRITERS[writer].rewrite(path / "packed")
    return Checkpoint.open(path / "packed")


def resolve(target: TargetKind, **values: Any) -> NeuronConfig:
    document = {"neuron_config": {"seq_len": 32, **values}}
    return resolve_config(document, checkpoint_dtype="float32", target=target, compiles=True).config.neuron_config


def test_a_plan_refuses_groups_by_name(planner: Planner) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        plan(planner, "8b", "trn2", quantized=True, quantization_dtype="int4")
    assert [one.field for one in refused.value.violations] == ["neuron_config.quantization_dtype"]


@pytest.mark.parametrize(
    ("writer", "target", "dtype"),
    [
        ("int8-channel", "trn2", "int8"),
        ("nxd", "trn2", "int8"),
        ("int4-channel", "trn2", "int8"),
        ("fp8-channel", "trn2", "int8"),
        ("fp8-channel", "trn3", "f8e4m3"),
    ],
)
def test_a_plan_follows_the_checkpoint_as_far_as_the_target_can(
    tmp_path: Path, writer: str, target: TargetKind, dtype: str
) -> None:
    config = resolve(target, **read_quantization(read(tmp_path, writer), target))
    said = (config.quantized, config.quantization_dtype, config.quantization_type)
    assert said == (True, dtype, "per_channel_symmetric")


def test_float8_beyond_what_cores_have(tmp_path: Path) -> None:
    """trn2 would read what is larger than 240 as infinities. Quantized anew, weights end there."""
    checkpoint = read(tmp_path, "fp8-channel")
    options = {"quantized": True, "quantization_type": "per_channel_symmetric"}
    float8 = options | {"quantization_dtype": "f8e4m3"}
    with pytest.raises(ConfigInvalid, match=r"may reach 448; trn2's end at 240; accepted: 'int8' or 'f8e5m2'"):
        plan_build(checkpoint, resolve("trn2", **float8), target="trn2")
    plan_build(checkpoint, resolve("trn2", **options), target="trn2")
    plan_build(checkpoint, resolve("trn3", **float8), target="trn3")
    write_checkpoint(tmp_path / "plain")
    plan_build(Checkpoint.open(tmp_path / "plain"), resolve("trn2", **float8), target="trn2")
