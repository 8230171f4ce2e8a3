"""Compares what a configuration says of the model's parts with the model, which alone decides whether it has them."""

from __future__ import annotations

from typing import Any

from bundle.errors import FieldViolation
from compiler_svc.config import MoENeuronConfig, NeuronConfig
from compiler_svc.config.tables.documents import ATTENTION, MOE
from compiler_svc.errors import FeatureNotServed
from compiler_svc.models.registry import describe_model
from compiler_svc.weights.checkpoint import Checkpoint


def check_claims(checkpoint: Checkpoint, config: NeuronConfig) -> None:
    """Checks that a model has the norms of queries and keys, or lacks the gates, that the configuration speaks of.

    NxD Inference adds norms that no checkpoint has weights for, and lets a dense model have its gates.

    Raises:
        FeatureNotServed: The model has no such norms, or has gates.
        ModelConfigInvalid, ModelNotServed: This compiler does not build the model.
    """
    description = describe_model(checkpoint.config)
    violations: list[FieldViolation] = []

    def refuse(name: str, value: Any, accepted: str) -> None:
        violations.append(FieldViolation(f"neuron_config.{name}", str(value), accepted))

    if config.qk_layernorm and all(layer.attention.query_norm is None for layer in description.layers):
        accepted = f"False: {description.architecture} does not normalize queries and keys ({ATTENTION})"
        refuse("qk_layernorm", config.qk_layernorm, accepted)
    is_gated = any(layer.mlp.gate is not None for layer in description.layers)
    if isinstance(config, MoENeuronConfig) and not config.glu_mlp and is_gated:
        refuse("glu_mlp", config.glu_mlp, f"True: the MLP of {description.architecture} has gates ({MOE})")
    if violations:
        raise FeatureNotServed(violations)
