"""Applies a configuration's model attributes to its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler_svc.config import InferenceConfig
from compiler_svc.config.transformers_neuronx import SECTION, validate_head_sharding
from compiler_svc.errors import ConfigInvalid
from compiler_svc.models.registry import flatten_attributes, list_attributes
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.overrides import find_changes, override_checkpoint


def keep_changes(
    checkpoint: Checkpoint, attributes: Mapping[str, Any], attribute_map: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Keeps the model attributes of a configuration that change what is built; also returns warnings about the others.
    So a file that repeats the whole `config.json`, as NxD Inference's files do, means the same as one that does not.
    """
    changes = find_changes(checkpoint, flatten_attributes(checkpoint.config, attributes), attribute_map)
    counting = list_attributes({**checkpoint.config, **changes})
    ignored = sorted(changes.keys() - counting)
    notes = [f"{', '.join(ignored)}: ignored, because the model does not depend on it"] if ignored else []
    return {name: value for name, value in changes.items() if name in counting}, tuple(notes)


def override_model(checkpoint: Checkpoint, config: InferenceConfig) -> Checkpoint:
    """The checkpoint with the configuration's model attributes in place of its own."""
    return override_checkpoint(checkpoint, config.model_attributes, config.attribute_map)


def check_head_sharding(document: Mapping[str, Any], checkpoint: Checkpoint, *, tp_degree: int) -> None:
    """Compares the model's KV heads with the strategy of a document's Transformers NeuronX options."""
    section = document.get(SECTION)
    if section is None:
        return
    num_heads = checkpoint.description.states[0].heads.num_kv_heads
    if (violation := validate_head_sharding(section, num_key_value_heads=num_heads, tp_degree=tp_degree)) is not None:
        raise ConfigInvalid([violation])
