"""Checkpoints with tensors that their models do not take, by real builds at optimization level 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.numpy import load_file, save_file

from bundle.store.layout import Layout
from bundle.store.referrers import list_referrers, read_referrer
from compiler_svc.builds.build_record import BUILD_TYPE
from compiler_svc.planning.admission import admit_request
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.running_compiler import Client
from tests.servers.stack import Stack
from tests.unit.compiler_svc.planning.planning import compile_request, open_planner, plan

BIAS = "model.layers.0.mlp.up_proj.bias"
#: Values that the golden check would find, were any of them read.
VALUE_HEAD = {"v_head.summary.weight": np.full((1, 32), np.nan, np.float32)}
LISTED = "v_head.* (1 tensor, 128 bytes)"
TINY: dict[str, Any] = {
    "neuron_config": {"seq_len": 16, "max_context_length": 8},
    "optimization_level": pb.OPTIMIZATION_LEVEL_O0,
}


def write(path: Path, bias: float, *, is_pickled: bool = False) -> None:
    file = write_checkpoint(path) / "model.safetensors"
    tensors = load_file(file) | VALUE_HEAD | {BIAS: np.array([0, bias], np.float32)}
    if is_pickled:
        file.unlink()
        torch.save({name: torch.from_numpy(one) for name, one in tensors.items()}, path / "pytorch_model.bin")
    else:
        save_file(tensors, file)


def test_plans_and_compiles_say_what_headers_say(tmp_path: Path) -> None:
    write(tmp_path / "models/surplus", 0)
    with open_planner(tmp_path, tmp_path / "models") as planner:
        planned = plan(planner, "surplus", "cpu", seq_len=64).warnings
    for warnings in (planned, admit_request(compile_request("surplus"), (tmp_path / "models",)).warnings):
        assert sum(LISTED in warning for warning in warnings) == 1
        assert sum(f"{BIAS} (1 tensor, 8 bytes)" in warning for warning in warnings) == 1


async def test_builds_leave_surplus_unread_and_look_at_biases(client: Client, stack: Stack, layout: Layout) -> None:
    write(pickled := stack.new_model("pickled"), 0, is_pickled=True)
    write(biased := stack.new_model("biased"), 1e-6)
    operation = await client.compile(**TINY, name="surplus", model=str(biased))
    how = await client.fail(operation, "INVALID_ARGUMENT", "CHECKPOINT_INVALID")
    assert BIAS in how.fields
    built = await client.build(**TINY, name="surplus", model=str(pickled))
    assert sum(LISTED in warning for warning in built.warnings) == 1
    (referrer,) = list_referrers(layout, built.digest, BUILD_TYPE)
    assert json.loads(read_referrer(layout, referrer.digest))["warnings"] == list(built.warnings)
