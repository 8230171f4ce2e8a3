"""Writes a configuration as the file that NxD Inference's `InferenceConfig.load` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from compiler_svc.config.interchange.saved_form import CLASSES, FUSED_TKG, FUSED_TKG_NAMES, write_class
from compiler_svc.config.tables.inference_config import InferenceConfig

#: The model's dtype, which the files have in `neuron_config` alone.
_DTYPE_NAMES: Final = frozenset({"dtype", "torch_dtype"})

_BUCKET_LISTS: Final = ("context_encoding_buckets", "token_generation_buckets", "prefix_buckets")
#: Lists that are written as null if they are empty: NxD Inference reads the last bucket of a list.
_NULL_IF_EMPTY: Final = (
    *_BUCKET_LISTS,
    "token_generation_batches",
    "modules_to_not_convert",
    "draft_model_modules_to_not_convert",
    "medusa_tree",
    "target_modules",
)


def to_neuron_config_json(config: InferenceConfig, model_config: Mapping[str, Any]) -> str:
    """Writes a resolved configuration in NxD Inference's form: JSON, indented by 2, names sorted, with a line end.

    `adapt_document` reads it back as the same configuration, and so do the tables. `normalize_top_k_affinities`, which
    NxD Inference saves but does not read, stands there under the name that it reads, too. `model_config` has the
    model's own attributes, as the checkpoint's `config.json` has them; empty leaves them out.
    """
    document = _write({**_write_model(model_config), **config.to_json()})
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _write_model(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's attributes with those that NxD Inference requires and transformers 5 leaves out or writes elsewhere."""
    attributes = {name: value for name, value in model_config.items() if name not in _DTYPE_NAMES}
    if attributes:
        attributes.setdefault("pad_token_id", None)
    rope = attributes.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        attributes.setdefault("rope_theta", rope["rope_theta"])
        attributes.setdefault("rope_scaling", None if scaling.get("rope_type", "default") == "default" else scaling)
    return attributes


def _write(document: dict[str, Any]) -> dict[str, Any]:
    written = {"fused_spec_config": None, "metadata": None, **document}
    written["neuron_config"] = _write_neuron_config(document["neuron_config"])
    if (fused := document.get("fused_spec_config")) is not None:
        draft = fused["draft_config"]
        written["fused_spec_config"] = _write_classes(fused) | {
            "draft_config": None if draft is None else _write(draft)
        }
    return written


def _write_neuron_config(neuron_config: dict[str, Any]) -> dict[str, Any]:
    written = _write_empty_lists(neuron_config)
    if not neuron_config["enable_bucketing"]:
        # The only bucket is derived again.
        written |= dict.fromkeys(_BUCKET_LISTS)
    if (lora := neuron_config["lora_config"]) is not None:
        renamed = {name: value for name, value in lora.items() if name != "enable_dynamic_multi_lora"}
        renamed["dynamic_multi_lora"] = lora["enable_dynamic_multi_lora"]
        written["lora_config"] = _write_empty_lists(renamed)
    if (blockwise := neuron_config.get("blockwise_matmul_config")) is not None:
        written["blockwise_matmul_config"] = _write_classes(blockwise)
    if "normalize_top_k_affinities" in neuron_config:
        written["disable_normalize_top_k_affinities"] = not neuron_config["normalize_top_k_affinities"]
    if (fused_tkg := neuron_config.get(FUSED_TKG)) is not None:
        written |= {name: fused_tkg[inside] for name, inside in FUSED_TKG_NAMES.items()}
    num_ranks = neuron_config["tp_degree"]
    return written | {
        "world_size": num_ranks,
        "local_ranks_size": num_ranks,
        "start_rank_id": 0,
        "overrides_torch_dtype": True,
    }


def _write_empty_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if name in _NULL_IF_EMPTY and not value else value for name, value in values.items()}


def _write_classes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: write_class(value) if name in CLASSES and isinstance(value, str) else value
        for name, value in values.items()
    }
