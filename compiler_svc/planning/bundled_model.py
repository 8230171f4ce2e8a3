"""Describes the model of a bundle from the bundle alone, without its checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from bundle.digest import sha256_bytes
from bundle.errors import BlobCorrupt
from bundle.store.reader import Bundle
from compiler_svc.config import NeuronConfig
from compiler_svc.errors import GraphAbiMismatch
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.registry import describe_model, read_text_config
from compiler_svc.planning.build_plan import choose_changes
from compiler_svc.planning.weights_fit import read_config
from compiler_svc.weights.checkpoint import CONFIG_FILE
from compiler_svc.weights.overrides import override_config

_MISSING: Final = "missing"


@dataclass(frozen=True, slots=True)
class BundledModel:
    """The model of a bundle as its executables have it: with all that its configuration changes."""

    description: ModelDescription
    config: NeuronConfig


def describe_bundled_model(bundle: Bundle) -> BundledModel:
    """Describes the model of a bundle's executables.

    Raises:
        GraphAbiMismatch: Another release has made the bundle, and this one would describe its model otherwise.
        BlobCorrupt: The bundle's `config.json` has other bytes.
    """
    config = read_config(bundle.manifest)
    attributes = override_config(
        read_text_config(_read_model_config(bundle)), config.model_attributes, config.attribute_map
    )
    description = choose_changes(config.neuron_config).apply(describe_model(attributes))
    heads = description.states[0].heads.layout(bundle.manifest.tp_degree).kv_heads
    if heads != bundle.manifest.state.kv_heads_by_rank:
        raise GraphAbiMismatch("kv_heads_by_rank", heads, bundle.manifest.state.kv_heads_by_rank)
    return BundledModel(description, config.neuron_config)


def _read_model_config(bundle: Bundle) -> dict[str, Any]:
    digest = next((layer.digest for layer in bundle.image.layers if layer.title == CONFIG_FILE), None)
    if digest is None:
        raise GraphAbiMismatch(CONFIG_FILE, _MISSING, "in the bundle")
    data = bundle.blob_path(digest).read_bytes()
    if (actual := sha256_bytes(data)) != digest:
        raise BlobCorrupt(digest, actual, CONFIG_FILE)
    document: dict[str, Any] = json.loads(data)
    return document
