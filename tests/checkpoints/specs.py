"""Specifications of small models, for tests that change one thing at a time."""

from __future__ import annotations

from typing import Any, Final

from bundle.manifest import Sampling
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.registry import describe_model, find_family
from compiler_svc.sharding.plan import WeightPlan, plan_weights
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.weights.checkpoint import Checkpoint

HOST_SAMPLING: Final = Sampling(
    mode="host",
    semantics="hf",
    dynamic=False,
    deterministic=False,
    global_topk=0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    chance="noise_keys",
)


def make_spec(checkpoint: Checkpoint, **changes: Any) -> GraphSpec:
    """Float32, three slots of 128 positions, logits."""
    defaults: dict[str, Any] = {
        "description": describe_model(checkpoint.config),
        "model": find_family(checkpoint.config).model,
        "dtype": "float32",
        "tp_degree": 1,
        "num_slots": 3,
        "max_length": 128,
        "ctx_batch_size": 1,
        "tkg_batch_size": 3,
        "sampling": HOST_SAMPLING,
        "output_logits": True,
    }
    return GraphSpec(**(defaults | changes))


def make_plan(
    checkpoint: Checkpoint,
    *,
    dtype: str = "float32",
    cast_type: str = "config",
    tp_degree: int = 1,
    description: ModelDescription | None = None,
) -> WeightPlan:
    """The weights of `make_spec`."""
    description = description or describe_model(checkpoint.config)
    return plan_weights(description, checkpoint, dtype=dtype, cast_type=cast_type, tp_degree=tp_degree)
