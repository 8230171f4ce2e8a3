"""Adapters on an XLA device: five and none in one batch, against the reference on the CPU."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from bundle.abi.tensor import DType
from compiler_svc.models.registry import describe_model
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import Adapters, ModelChanges, Quantization
from compiler_svc.trace.submodels import describe_state
from execution.dtypes import TORCH_DTYPES
from tests.checkpoints.tiny_models import TOLERANCE, deviation, write_tiny_model
from tests.device.xla.graphs import check_graph
from tests.device.xla.models import FAMILIES
from tests.device.xla.traces import Traces
from tests.ranks.adapter_batches import RANKS, ROWS, draw_adapters, generate_on_ranks

ROOM: Final = Adapters(slots=AdapterSlots(slots=len(RANKS), rank=max(RANKS)))
#: As far apart as sums in bfloat16 are.
LIMITS: Final[dict[DType, float]] = {"float32": TOLERANCE, "bfloat16": 5e-2}


@pytest.mark.parametrize(
    ("architecture", "dtype", "changes"),
    [
        ("LlamaForCausalLM", "float32", {"fuses_qkv": True}),
        ("LlamaForCausalLM", "float32", {"quantization": Quantization(format="int8_per_channel")}),
        ("GPT2LMHeadModel", "float32", {}),
        ("Phi3ForCausalLM", "bfloat16", {}),
    ],
    ids=["fused", "quantized", "transposed", "bfloat16"],
)
def test_five_adapters_in_one_batch(tmp_path: Path, architecture: str, dtype: DType, changes: dict[str, Any]) -> None:
    (attributes,) = (model.values[1] for model in FAMILIES if model.values[0] == architecture)
    tiny = write_tiny_model(tmp_path, attributes, architecture=architecture, dtype=TORCH_DTYPES[dtype])
    made = ModelChanges(adapters=ROOM, **changes)
    description = made.apply(describe_model(tiny.checkpoint.config))
    sizes = {"num_slots": len(ROWS), "ctx_batch_size": len(ROWS), "tkg_batch_size": len(ROWS)}
    spec = tiny.spec(description=description, dtype=dtype, **sizes)
    adapters = {name: tensor.to(TORCH_DTYPES[dtype]) for name, tensor in draw_adapters(description).items()}
    slots = torch.tensor([slot for slot, _ in ROWS], dtype=torch.int32)

    traces = Traces(tiny.checkpoint.config, changes=made)
    (found,) = generate_on_ranks(tiny, spec, adapters, slots, traces.make_run)
    (expected,) = generate_on_ranks(tiny, spec, adapters, slots)
    assert deviation(found, expected) < LIMITS[dtype]
    assert len(traces.graphs) == 2
    for graph in traces.graphs.values():
        check_graph(graph, {prod(tensor.shape) for tensor in describe_state(spec).tensors})
